"""Known mistakes in steps that do not use jaxdist, each given to `jaxdist.prove`.

The mistakes are public reports of wrong numbers and faults planted in two trainers. The trainers
are also proved without a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxdist
from benchmarks.prove import strangers
from benchmarks.prove.pieces import kept
from benchmarks.prove.public_bugs import BUGS, DEVICES, Bug, steps_of
from jaxdist.proofs.certificate import Proof
from jaxdist.types import JsonObject

MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
ROWS = strangers.mesh_of(DEVICES)
FAULTS = {"fsdp": strangers.FSDP_FAULTS, "nnx": strangers.NNX_FAULTS}
"""The faults that are planted in each trainer."""


@dataclass(frozen=True)
class Known:
    """The proof of a step with a known mistake, or of a trainer without one.

    Attributes:
      of: the name of the trainer, or "a report".
      fault: the name of the report or the fault, or an empty string for a trainer without a fault.
      verdict: the verdict of the proof.
      types: the lines of code that types named.
      numbers: the values that differ from those of a single device.
    """

    of: str
    fault: str
    verdict: str
    types: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


def reports() -> Iterator[Known]:
    """Yield the proof of a step for each public report."""
    for found in kept("reports", BUGS, lambda name: _json("a report", name, proof_of(BUGS[name]))):
        yield Known(**found)


def trainers() -> Iterator[Known]:
    """Yield the proof of each trainer without a fault, and with each of its faults."""
    cases = [(trainer, fault) for trainer, faults in FAULTS.items() for fault in ("", *faults)]
    for found in kept(
        "trainers", cases, lambda case: _json(case[0], case[1], proof_of_trainer(*case))
    ):
        yield Known(**found)


def _json(of: str, fault: str, proof: Proof) -> JsonObject:
    lines = dict.fromkeys(finding.where for finding in proof.types.findings)
    wrong = dict.fromkeys(one.name for compared in proof.numbers for one in compared.wrong)
    return asdict(Known(of, fault, proof.verdict, tuple(lines), tuple(wrong)))


def proof_of(bug: Bug) -> Proof:
    """Prove the step of a report; the reference on a single device is the correct step."""
    wrong, right, state, batch = steps_of(bug, MESH)
    return jaxdist.prove(wrong, MESH, state, batch, one_device=jax.jit(right), weight="m")


@cache
def alone(trainer: str) -> Any:
    """Return the step of a trainer without a fault, for a single device."""
    one = strangers.mesh_of(1)
    return strangers.fsdp_step(one) if trainer == "fsdp" else jax.jit(strangers.nnx_step(one))


def proof_of_trainer(trainer: str, fault: str = "") -> Proof:
    """Prove a trainer in which a fault is planted, or without a fault if `fault` is empty."""
    step = (strangers.fsdp_step if trainer == "fsdp" else strangers.nnx_step)(ROWS, fault)
    state = strangers.fsdp_state(ROWS) if trainer == "fsdp" else strangers.nnx_pair(ROWS)[1]
    more = {"one_device": alone(trainer), "weight": "weight"}
    return jaxdist.prove(step, ROWS, state, strangers.batch_on(ROWS), **more)
