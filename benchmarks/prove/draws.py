"""Random correct plans, for which the check of types must report no error.

This module checks only types; `jaxdist parity --draw` compares the numbers of the same draws with
one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from benchmarks.draws.draw import draw
from benchmarks.prove.pieces import kept
from jaxdist.config import Document, validate
from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.proofs.types.program import types_of
from jaxdist.types import Json, JsonObject

ROWS = 4
"""The factor on the batches of the draws: with a single row on each device and microbatch, the dim
of the rows could not be distinguished from other dims of size 1."""


@dataclass(frozen=True)
class Outcome:
    """The result of checking the types of a draw.

    Attributes:
      seed: the seed of the draw.
      refused: the reason why the plan cannot be built, or empty if it can.
      alarms: the findings, each of which is a false alarm.
      undecided: the reasons why outputs are undecided, without duplicates.
      leaves, proved: the number of outputs of the step's `shard_map`s, and of proved outputs.
    """

    seed: int
    refused: str = ""
    alarms: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    leaves: int = 0
    proved: int = 0


def outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Yield the result for each draw."""

    def one(seed: int) -> JsonObject:
        # Each draw traces different programs, which jax would otherwise keep in memory.
        if seed % 10 == 0:
            jax.clear_caches()
        return asdict(judged(seed))

    yield from (Outcome(**found) for found in kept("draws", seeds, one))


def judged(seed: int) -> Outcome:
    """Check the types of the train step of a draw."""
    try:
        found = types_of(built(enlarged(draw(seed).sections)).program)
    except JaxdistError as error:
        return Outcome(seed, refused=" ".join(str(error).split()))
    reasons = {reason for reasons in found.undecided.values() for reason in reasons}
    alarms = tuple(map(str, found.findings))
    return Outcome(seed, "", alarms, tuple(sorted(reasons)), len(found.outputs), len(found.proved))


def enlarged(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draw's sections with larger batches."""
    train = {**sections["train"], "batch_size": sections["train"]["batch_size"] * ROWS}
    if ramp := train.get("batch_ramp"):
        train["batch_ramp"] = {name: size * ROWS for name, size in ramp.items()}
    if phases := train.get("phases"):
        train["phases"] = [
            {n: v * ROWS if n == "batch_size" else v for n, v in phase.items()} for phase in phases
        ]
    return {**sections, "train": train}


def built(sections: Mapping[str, Json]) -> Experiment:
    """Build a draw's plan on its fake devices."""
    config = validate(Document(dict(sections)), ExperimentConfig)
    return build(config, devices=jax.devices()[: config.mesh.fake_devices])
