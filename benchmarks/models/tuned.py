"""Fine-tuning by jaxdist, and by peft and trl: losses of adapters, and preference optimization.

`python -m benchmarks.models.tuned PYTHON FILE` writes the golden file of
tests/interchange/test_tuned.py; PYTHON must have torch, transformers, peft and trl.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.models.drawn import asked, write_drawn
from jaxdist.checkpoint.parts import BeginWith
from jaxdist.commands.adapters import import_adapters
from jaxdist.commands.export_model import export_model
from jaxdist.commands.import_model import import_model, synthetic_data
from jaxdist.experiment import Experiment, build, load
from jaxdist.interchange import adapters as files
from jaxdist.interchange import safetensors
from jaxdist.interchange.source import Source, open_source
from jaxdist.models.tuning.lora import PREFIX
from jaxdist.run.loading.begin import begin_with
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names, tree_bytes, tree_size
from jaxdist.types import JsonObject

QUIET = Console(quiet=True)
DRAWN = "llama3"
STEPS, ROWS, LENGTH, RATE = 10, 2, 64, 1e-3
LORA: JsonObject = {"rank": 8, "alpha": 16.0, "targets": ["blocks/attention/*", "blocks/mlp/*"]}
ADAMW = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
CONSTANT = {"type": "constant"}
PROMPT, ENDS, BETA = 24, ((64, 40), (33, 50)), 0.1
"""The tokens of a prompt, the ends of both texts of each pair, and the strength of the loss."""


class Blank:
    """Two examples of zeros with the shapes of a task's batches."""

    def __init__(self, task: str):
        pair = (2,) if task == "dpo" else ()
        self.example: dict[str, np.ndarray] = {
            "tokens": np.zeros((*pair, LENGTH + 1), np.int32),
            "segments": np.zeros((*pair, LENGTH), np.int32),
        }
        if pair:
            self.example["answer"] = np.ones((*pair, LENGTH), np.float32)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.example


def batches(vocab: int) -> dict[str, np.ndarray]:
    """Return random batches for both tasks: text of ten steps, and a batch of pairs."""
    rng = np.random.default_rng(0)
    pairs = rng.integers(3, vocab, (ROWS, 2, LENGTH + 1), np.int32)
    pairs[:, 1, :PROMPT] = pairs[:, 0, :PROMPT]
    text = rng.integers(3, vocab, (STEPS, ROWS, LENGTH + 1), np.int32)
    return {"text": text, "pairs": pairs, "ends": np.array(ENDS)}


def experiment(source: Source, task: str, sections: Mapping[str, Any]) -> Experiment:
    """Return the experiment that tunes a model with adapters on a task, "text" or "dpo"."""
    data = {"type": "import", "path": f"{__name__}:Blank", "args": {"task": task}}
    values = {
        "model": {**source.family.model(source.config), "lora": LORA},
        "data": {**data, "vocab_size": source.inputs.vocab_size},
        "loss": {"type": "dpo", "beta": BETA} if task == "dpo" else {"type": "next_token"},
        "optim": {"type": "adamw", "learning_rate": RATE, "schedule": CONSTANT, **ADAMW},
        "train": {"steps": STEPS, "batch_size": ROWS},
        **sections,
    }
    document, config = load(values)
    return build(config, document, devices=jax.devices()[: sections.get("mesh", {}).get("data", 1)])


def ours(
    path: Path, folder: Path, sections: Mapping[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], float]:
    """Return the losses and gradients of jaxdist, and the bytes of state of an adapter's element.

    The initial adapters are written to `folder`.

    Args:
      sections: sections of the config, such as a mesh.
    """
    source, found = open_source(path), {}
    given = batches(source.inputs.vocab_size)
    made = experiment(source, "text", sections or {})
    program = made.program
    state, _ = begin_with(program, BeginWith(run=str(path)), say=print)
    counts = [leaf for leaf in jax.tree.leaves(program.own_shapes.opt_state) if not leaf.shape]
    held = tree_bytes(program.own_shapes.opt_state) - tree_bytes(counts)
    size = held / tree_size(program.model.trained)
    write(made, source, folder / "text", program.home.used.params(state.params)[PREFIX])
    losses = []
    for tokens in given["text"]:
        state, metrics = program.train(state, put(made, tokens))
        losses.append(float(metrics[0]))
    found["text losses"] = np.array(losses)
    write(made, source, folder / "tuned", program.home.used.params(state.params)[PREFIX])
    # The loss of a step is computed from the parameters before the step.
    _, metrics = program.train(state, put(made, given["text"][0]))
    found["tuned loss"] = np.asarray(metrics[0])

    made = experiment(source, "dpo", sections or {})
    program = made.program
    state, _ = begin_with(program, BeginWith(run=str(path)), say=print)
    state = moved(made, state)
    write(made, source, folder / "dpo", program.home.used.params(state.params)[PREFIX])
    answer = np.zeros((ROWS, 2, LENGTH), np.float32)
    for row, ends in zip(answer, ENDS, strict=True):
        for one, end in zip(row, ends, strict=True):
            one[PROMPT - 1 : end - 1] = 1
    result = program.gradients(state, put(made, given["pairs"], answer))
    loss = result.sums["loss"]
    found["dpo loss"] = np.asarray(loss.total / loss.weight)
    write(made, source, folder / "grads", result.grads[PREFIX])
    for name, tensor in safetensors.read_header(folder / "grads" / files.TENSORS).items():
        found[f"grad {name}"] = np.array(tensor.open())
    return found, size


def put(made: Experiment, tokens: np.ndarray, answer: np.ndarray | None = None) -> Any:
    """Return a batch on the devices of an experiment."""
    segments = np.zeros((*tokens.shape[:-1], LENGTH), np.int32)
    held = {"tokens": tokens, "segments": segments, "answer": answer}
    held["weight"] = np.ones(ROWS, np.float32)
    shapes = made.program.batch
    return {name: jax.device_put(held[name], shape.sharding) for name, shape in shapes.items()}


def moved(made: Experiment, state: TrainState) -> TrainState:
    """Return a state with random adapters, so that the model is not its own reference."""
    rng = np.random.default_rng(1)
    named = flatten_with_names(state.params)
    leaves = [
        jax.device_put(0.05 * rng.standard_normal(x.shape, np.float32), x.sharding)
        if name.startswith(f"{PREFIX}/")
        else x
        for name, x in named
    ]
    params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
    return TrainState(**{**vars(state), "params": params})


def write(made: Experiment, source: Source, out: Path, tree: Any) -> None:
    """Write adapters, or their gradients, as PEFT's files."""
    out.mkdir(parents=True)
    config: Any = made.config.model
    values = {f"{PREFIX}/{name}": np.asarray(x) for name, x in flatten_with_names(tree)}
    rows, adapters = source.family.table(source.config), made.program.model.adapters
    settings = files.write_adapters(out, config.lora, adapters, rows, values, base=str(source.path))
    (out / files.SETTINGS).write_text(json.dumps(settings))


def export_tuned(path: Path, folder: Path) -> None:
    """Export the tuned model, with its adapters merged, by the commands of a user."""
    import_model(path, folder / "base", small(path), console=QUIET)
    import_adapters(folder / "tuned", folder / "base", folder / "run", console=QUIET)
    export_model(folder / "run", folder / "merged", console=QUIET)


def small(path: Path) -> list[str]:
    """Return settings that make the data of an imported run small."""
    data = {**synthetic_data(open_source(path)), "examples": 16, "heldout_examples": 8}
    return [f"data={json.dumps(data | ({'window': 16} if 'window' in data else {}))}"]


def theirs(python: str, path: Path, folder: Path) -> dict[str, np.ndarray]:
    """Return the losses of peft, and the loss and gradients of trl, for adapters in a folder.

    The loss of the exported model is computed by transformers.

    Raises:
      RunError: the other Python fails.
    """
    given = batches(open_source(path).inputs.vocab_size)
    settings = {"prompt": PROMPT, "beta": BETA, "rate": RATE, **ADAMW}
    return asked(python, "peer_tuned.py", path, {**given, **settings}, folder)


def golden(found: Mapping[str, np.ndarray]) -> JsonObject:
    """Return the entry of the golden file: the losses, and the norms of gradients."""
    norms = {n: float(np.linalg.norm(x)) for n, x in found.items() if n.startswith("grad ")}
    losses = {n: x.tolist() for n, x in found.items() if n.endswith(("losses", "loss"))}
    return {**losses, "grads": norms}


def apart(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the largest relative differences of losses, and of gradients over the largest."""
    grads = [name for name in right if name.startswith("grad ")]
    most = max(float(np.abs(right[name]).max()) for name in grads)
    return {
        "losses of ten steps beside peft": relative(found, right, "text losses"),
        "loss of the exported model in transformers": relative(found, right, "tuned loss"),
        "loss beside trl": relative(found, right, "dpo loss"),
        "gradients beside trl": max(float(np.abs(found[n] - right[n]).max()) for n in grads) / most,
    }


def from_exact(
    found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, float]]:
    """Return the distances of jaxdist and of trl from trl in float64, by loss and gradients."""
    exact = {name.removeprefix("exact "): x for name, x in right.items() if name[:6] == "exact "}
    loss = exact.pop("loss")
    most = max(float(np.abs(x).max()) for x in exact.values())
    pairs = []
    for one in (found, right):
        off = max(float(np.abs(one[f"grad {name}"] - x).max()) for name, x in exact.items())
        pairs.append((abs(float(one["dpo loss"] / loss) - 1), off / most))
    return dict(zip(("loss", "gradients"), zip(*pairs, strict=True), strict=True))


def relative(found: Mapping[str, Any], right: Mapping[str, Any], name: str) -> float:
    """Return the largest relative difference of an array."""
    return float(np.abs(found[name] / right[name] - 1).max())


def main(arguments: Sequence[str]) -> None:
    python, file = arguments
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / DRAWN
        write_drawn(DRAWN, path)
        found, size = ours(path, Path(folder) / "adapters")
        export_tuned(path, Path(folder) / "adapters")
        right = theirs(python, path, Path(folder) / "adapters")
    print({**apart(found, right), "bytes": size})
    Path(file).write_text(json.dumps(golden(right), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
