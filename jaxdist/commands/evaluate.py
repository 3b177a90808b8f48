"""`jaxdist eval` and `jaxdist generate`: use a run directory, on any mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdist.checkpoint.parts import taken
from jaxdist.checkpoint.restore import Restored, restore_as
from jaxdist.config.importing import foreign_code
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment, build, load
from jaxdist.metrics.report import plain, write_json
from jaxdist.run.checkpoints import adapted
from jaxdist.run.directory import RunDirectory
from jaxdist.run.loading.begin import holds_parameters_only, load_part
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.report.results import print_results
from jaxdist.train.evaluate import evaluate
from jaxdist.train.generate import generate
from jaxdist.train.parts import evaluated_parts
from jaxdist.trees import flatten_with_names


def open_run(
    run: Path, overrides: Sequence[str], *, step: int | None, console: Console
) -> tuple[Experiment, Restored]:
    """Open a run directory; return its experiment and its newest checkpoint, or that of `step`.

    Raises:
      RunError: there is no run in the directory.
      CheckpointError: there is no checkpoint, or no checkpoint fits the experiment.
    """
    directory = RunDirectory(run)
    if not directory.occupied:
        raise RunError(
            f"{run} is no run directory, for it has no {directory.config.name}: give the one that "
            "`jaxdist train` printed after the word run"
        )
    document, config = load(directory.config, overrides)
    for text in foreign_code(document.values):
        console.print(f"code   {text}", soft_wrap=True, markup=False)
    experiment = build(config, document)

    def say(text: str) -> None:
        console.print(f"[bold red]checkpoint:[/] {text}", soft_wrap=True)

    # Checkpoints of a part, and of an imported model, lack states that a resumed run would need.
    if config.checkpoint.parts is not None or holds_parameters_only(directory, step):
        parts = evaluated_parts(experiment.program)
        names = taken(parts, [n for n, _ in flatten_with_names(experiment.program.own_shapes)])
        return experiment, load_part(directory, experiment.program, names, step=step, say=say)
    adapt = adapted(experiment.program, say)
    restored = restore_as(directory.checkpoints, adapt, step=step, on_event=say)
    check_order(directory, restored.step)
    return experiment, restored


def evaluate_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    json_file: Path | None = None,
    console: Console,
) -> dict[str, float]:
    """Evaluate a run on its whole held-out split; print, write and return the means.

    Raises:
      RunError: there is no run, or its data has no held-out split.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    if experiment.heldout is None:
        raise RunError(
            "the data of this run has no held-out split to evaluate on: give its section data one, "
            "such as heldout_fraction or heldout_examples"
        )
    state: Any = restored.state
    with experiment.heldout.evaluation_batches() as batches:
        program = experiment.program
        means = evaluate(program, program.evaluated(state), state.buffers, batches)
    console.print(f"data   {experiment.dataset.description}", soft_wrap=True)
    if json_file is not None:
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
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    step: int | None = None,
    json_file: Path | None = None,
    console: Console,
) -> str:
    """Continue a prompt with the run's model, and return the prompt and its continuation.

    Raises:
      RunError: the run's model does not produce text.
    """
    experiment, restored = open_run(run, overrides, step=step, console=console)
    tokenizer = experiment.dataset.tokenizer
    if tokenizer is None:
        raise RunError("the model of this run was not trained on text, so it generates none")
    if "targets" in experiment.program.batch:
        raise RunError(
            "the model of this run predicts hidden tokens from both sides, so it cannot continue a "
            "text: generate needs a decoder, model.type gpt"
        )
    state: Any = restored.state
    out = generate(
        experiment.program,
        experiment.program.evaluated(state),
        state.buffers,
        # The stream has the separator before every document, so a prompt begins with it too.
        prompt=[tokenizer.end_of_document, *tokenizer.encode([os.fsencode(prompt)])[0].tolist()],
        window=experiment.program.batch["tokens"].shape[1] - 1,
        vocab_size=experiment.dataset.vocab_size or 0,
        count=tokens,
        temperature=temperature,
        seed=seed,
    )
    text = tokenizer.decode(out)
    if json_file is not None:
        settings = {"prompt": prompt, "temperature": temperature, "seed": seed}
        report = {"run": str(run), "step": restored.step, **settings, "text": text}
        write_json(json_file, report, what="text")
    return text
