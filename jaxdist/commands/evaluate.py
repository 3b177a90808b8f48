"""`jaxdist eval` and `jaxdist generate`: the use of a trained run on any mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdist.checkpoint.parts import taken
from jaxdist.checkpoint.restore import Restored, restore_as
from jaxdist.config.importing import foreign_code
from jaxdist.data.text.tokenizer import Tokenizer
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment, build, load
from jaxdist.metrics.report import plain, write_json
from jaxdist.run.checkpoints import adapted
from jaxdist.run.directory import existing_run
from jaxdist.run.loading.begin import holds_parameters_only, load_parameters, load_part
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.report.results import print_results
from jaxdist.train.evaluate import evaluate
from jaxdist.train.generate import Generator
from jaxdist.train.parts import evaluated_parts
from jaxdist.train.sampling import Sampling
from jaxdist.train.strategy.config import Hybrid
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject


def open_run(
    run: Path,
    overrides: Sequence[str],
    *,
    step: int | None,
    whole: bool = False,
    console: Console,
) -> tuple[Experiment, Restored]:
    """Return the experiment of a run directory, and the restored checkpoint.

    Args:
      run: the run directory.
      overrides: the settings that override the run's config.
      step: the step of the checkpoint, or None for the newest checkpoint.
      whole: whether to restore the complete state. If false, only the arrays that evaluation needs
        are restored. These are the parameters and buffers, unless the optimizer or the strategy
        evaluates other arrays.
      console: the console for messages about checkpoints.

    Raises:
      RunError: there is no run in the directory.
      CheckpointError: there is no checkpoint, or no checkpoint fits the experiment.
    """
    directory = existing_run(run)
    document, config = load(directory.config, overrides)
    print_foreign_code(document.values, console)
    experiment = build(config, document)

    def say(text: str) -> None:
        console.print(f"[bold red]checkpoint:[/] {text}", soft_wrap=True)

    program = experiment.program
    parts = evaluated_parts(program)
    if not whole and parts == ("params", "buffers"):
        return experiment, load_parameters(directory, program, step=step, say=say)
    # A checkpoint of some parts, or of an imported model, lacks some of the state that a resumed
    # run needs. If the checkpoint has only parameters, the averages and the slow weights begin with
    # these parameters.
    bare = holds_parameters_only(directory, step)
    if config.checkpoint.parts is not None or bare:
        parts = ("params", "buffers") if bare else parts
        names = taken(parts, [n for n, _ in flatten_with_names(program.own_shapes)])
        return experiment, load_part(directory, program, names, step=step, say=say)
    adapt = adapted(program, say)
    restored = restore_as(directory.checkpoints, adapt, step=step, on_event=say)
    check_order(directory, restored.step)
    return experiment, restored


def print_foreign_code(values: JsonObject, console: Console) -> None:
    """Print a line about each part of a config that is code of the user."""
    for text in foreign_code(values):
        console.print(f"code   {text}", soft_wrap=True, markup=False)


def evaluate_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    json_file: Path | None = None,
    console: Console,
) -> dict[str, float]:
    """Evaluate a run on its complete held-out split, and print and return the means.

    Args:
      run: the run directory.
      overrides: the settings that override the run's config.
      step: the step of the checkpoint, or None for the newest checkpoint.
      json_file: a file for the means as JSON, or None to write none.
      console: the console that prints the means.

    Raises:
      RunError: there is no run, or its data has no held-out split.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    if experiment.heldout is None:
        raise RunError(
            "the data of this run has no held-out split to evaluate on: set data.heldout_fraction "
            "or data.heldout_examples"
        )
    state: Any = restored.state
    strategy = experiment.config.strategy
    if experiment.rows is not None and isinstance(strategy, Hybrid):
        # The module is imported here, since it needs packages that a plain installation does not
        # have.
        from jaxdist.tables.training.program import saved_rows

        given = run, restored.step, experiment.rows, strategy.optimizer
        experiment.rows.fetch = saved_rows(*given).read
    with experiment.heldout.evaluation_batches() as batches:
        program = experiment.program
        means = evaluate(program, program.evaluated(state), state.buffers, batches)
    console.print(f"data   {experiment.dataset.description}", soft_wrap=True)
    report = {"run": str(run), "step": restored.step, "heldout": plain(means)}
    write_json(json_file, report, what="evaluation")
    console.print(f"step   {restored.step}")
    baselines = experiment.baselines()
    print_results(means, baselines, loss_unit=experiment.loss_unit, console=console)
    return means


def generate_from_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    prompts: Sequence[str],
    tokens: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
    step: int | None = None,
    json_file: Path | None = None,
    console: Console,
) -> list[str]:
    """Continue prompts with a run's model, and return each prompt with its continuation.

    Args:
      run: the run directory.
      overrides: the settings that override the run's config.
      prompts: the texts to continue.
      tokens: the largest number of tokens to add to a text. A text also ends where the model ends
        the document.
      sampling: the settings of the random choice of tokens.
      stops: the tokens that end a text, in addition to the end of a document.
      step: the step of the checkpoint, or None for the newest checkpoint.
      json_file: a JSON file for the texts, their tokens, and the logarithm of the probability of
        each added token. None writes no file.
      console: the console for messages about checkpoints.

    Raises:
      RunError: the run's model does not produce text, or a text of `stops` is not a single token.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    tokenizer = experiment.dataset.tokenizer
    if tokenizer is None:
        raise RunError(
            "the model of this run was not trained on text, so the model cannot generate text: "
            "name a run whose data have a tokenizer (data.type text or chat)"
        )
    if "targets" in experiment.program.batch:
        raise RunError(
            "the model of this run predicts hidden tokens from the tokens on both sides, so the "
            "model cannot continue a text: generate needs a decoder (model.type gpt)"
        )
    state: Any = restored.state
    # A prompt begins with the separator of documents, which precedes every document in training.
    begin = tokenizer.end_of_document
    given = [os.fsencode(prompt) for prompt in prompts]
    program = experiment.program
    window, vocab_size = program.batch["tokens"].shape[1] - 1, experiment.dataset.vocab_size or 0
    found = Generator(program, window, vocab_size)(
        program.evaluated(state),
        state.buffers,
        prompts=[[begin, *text.tolist()] for text in tokenizer.encode(given)],
        count=tokens,
        sampling=sampling,
        stops={begin, *(_stop(tokenizer, text) for text in stops)},
        log_probs=json_file is not None,
    )
    texts = [tokenizer.decode(text.tokens) for text in found]
    samples = [
        {"prompt": prompt, "text": text, **own._asdict()}
        for prompt, text, own in zip(prompts, texts, found, strict=True)
    ]
    settings = {**asdict(sampling), "stops": [*stops]}
    report = {"run": str(run), "step": restored.step, **settings, "samples": samples}
    write_json(json_file, report, what="text")
    return texts


def _stop(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of the stop token, after which a generated text ends.

    This is the token whose name is `text`, or else the single token to which `text` is encoded.

    Raises:
      RunError: the text is encoded to several tokens, or to no token.
    """
    number = tokenizer.number(text)
    if number is not None:
        return number
    spelled = tokenizer.encode([os.fsencode(text)])[0].tolist()
    if len(spelled) != 1:
        raise RunError(
            f"--stop {text!r} is {len(spelled)} tokens of this run's tokenizer, but a text can end "
            "only at a single token: use text of a single token, such as <|im_end|> or a line "
            "break"
        )
    return spelled[0]
