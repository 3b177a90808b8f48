"""Faults to plant in the code of train steps: their place, their code, and the values they spoil.

A fault is planted only in the code of the plan; the reference on one device computes without the
fault. Each fault represents bugs that were reported in other systems, such as sums that are missing
or taken twice, or norms and counts of a single shard.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MLP = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {"type": "images", "source": "digits"},
    "optim": {"type": "adamw", "learning_rate": 1e-3, "schedule": {"type": "constant"}},
    "train": {"steps": 8, "batch_size": 64},
    "eval": {"every": 8, "batches": 2},
}
TOWER = {
    **MLP,
    "loss": {"type": "classification"},
    "optim": {"type": "adamw", "learning_rate": 1e-3, "skip_nonfinite": True},
}
FACTORED = {
    **MLP,
    "optim": {
        "type": "import",
        "path": "optax:adafactor",
        "learning_rate": 1e-2,
        "args": {"min_dim_size_to_factor": 2},
    },
}
TOWER_ARGS = {"features": 64, "classes": 10, "layers": 2, "embed": 8, "mlp": 8}
GPT = {
    "model": {"type": "gpt", "layers": 2, "embed": 16, "heads": 2, "tied_head": True},
    "data": {"type": "synthetic", "kind": "tokens", "vocab_size": 32, "window": 8},
    "optim": {"type": "adamw", "learning_rate": 1e-3, "schedule": {"type": "constant"}},
    "train": {"steps": 8, "batch_size": 16, "microbatches": 2},
}


def _plan(base: dict[str, Any], mesh: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    return {**base, "mesh": {**mesh, "fake_devices": 4}, "parallel": parallel}


def _tower(**args: Any) -> dict[str, Any]:
    model = {"type": "import", "path": "benchmarks.draws.imported:Tower", "args": TOWER_ARGS | args}
    return {**TOWER, "model": model}


RING = {"type": "ring", "bucket_bytes": 4096}
FOUR = {"data": 4}
TWO_BY_TWO = {"data": {"dcn": 2, "ici": 2}}
PLANS: dict[str, dict[str, Any]] = {
    "ring": _plan(MLP, FOUR, reduce=RING),
    "xla": _plan(MLP, FOUR, reduce={"type": "xla"}),
    "networks": _plan(MLP, TWO_BY_TWO, reduce={"type": "xla"}),
    "networks_zero": _plan(MLP, TWO_BY_TWO, reduce={"type": "xla"}, zero={"stage": 1}),
    "zero1": _plan(MLP, FOUR, reduce=RING, zero={"stage": 1}),
    "zero2": _plan(MLP, FOUR, reduce=RING, zero={"stage": 2}),
    "zero3": _plan(MLP, FOUR, reduce=RING, zero={"stage": 3}),
    "microbatches": _plan(
        {**MLP, "train": {"steps": 8, "batch_size": 64, "microbatches": 4}}, FOUR, reduce=RING
    ),
    "lamb": _plan(
        {**MLP, "optim": {"type": "lamb", "learning_rate": 1e-2}},
        FOUR,
        reduce=RING,
        zero={"stage": 1},
    ),
    "factored": _plan(FACTORED, FOUR, reduce=RING, zero={"stage": 1}),
    "factored3": _plan(FACTORED, FOUR, reduce=RING, zero={"stage": 3}),
    "buffers": _plan(_tower(batch_norm=True), FOUR, reduce=RING),
    "dropout": _plan(
        {**_tower(dropout=0.5), "train": {"steps": 8, "batch_size": 64, "microbatches": 2}},
        FOUR,
        reduce=RING,
    ),
    "pipeline": _plan(
        GPT, {"data": 2, "stage": 2}, reduce=RING, pipeline={"schedule": {"type": "1f1b"}}
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault to plant at one place of the code.

    Attributes:
      family: the class of mistakes.
      file: the file in the package.
      was, becomes: a text that occurs once in the file, and its replacement.
      spoils: a regular expression for the names of the leaves or values that become wrong.
      plans: the plans in which it is planted.
    """

    family: str
    file: str
    was: str
    becomes: str
    spoils: str
    plans: tuple[str, ...]


def faults() -> list[Fault]:
    """Read the faults, in the order of their families."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    return [Fault(**{**one, "plans": tuple(one["plans"])}) for one in found]
