"""Random numbers that are the same in two steps, microbatches or devices, found from losses."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.prove.faults import PLANS, faults
from benchmarks.prove.mutations import planted
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.proofs.draws import DEVICES, MICROBATCHES, STEPS, repeated
from jaxdist.proofs.numbers import Reference
from jaxdist.proofs.reduce import reduced

BATCH = {"x": np.arange(24.0).reshape(12, 2), "positions": np.arange(5)}


def loss(stale: str, batch: dict[str, np.ndarray], step: int, seed: int) -> float:
    """The loss of 2 devices with 3 microbatches, whose keys lack what is stale."""
    total = 0.0
    for device, rows in enumerate(np.split(batch["x"], 2)):
        for k in range(3):
            given = {"seed": seed, "step": step, "microbatch": k, "device": device}
            if stale == "half of the microbatches":
                given["microbatch"] //= 2
            key = [0 if name in stale.split(" of ")[0] else part for name, part in given.items()]
            total += (np.random.default_rng(key).random((2, 2)) * rows[k::3]).sum()
    return total


@pytest.mark.parametrize(
    ("stale", "found"),
    [
        ("", []),
        ("step", [STEPS]),
        ("microbatch", [MICROBATCHES]),
        ("device", [DEVICES]),
        ("half of the microbatches", [MICROBATCHES]),
        ("step and device", [STEPS, DEVICES]),
        ("seed, step, microbatch and device", []),
    ],
)
def test_random_numbers_that_repeat_are_named(stale, found):
    def of(*given):
        return loss(stale, *given)

    assert [*repeated(of, BATCH, microbatches=3, devices=2, limit=1e-12)] == found


@pytest.mark.full
def test_a_stale_key_of_dropout_is_a_wrong_number():
    config = validate(Document(PLANS["dropout"]), ExperimentConfig)
    sections, _ = reduced(build(config, devices=jax.devices()[:4]))
    reference = Reference(sections, False)

    def wrong() -> list[str]:
        return [one.name for one in reference.compare("a plan", sections)[0].wrong]

    assert not wrong()
    stale = [fault for fault in faults() if fault.family == "stale key"]
    for fault, name in zip(stale, (MICROBATCHES, STEPS), strict=True):
        with planted(fault):
            assert wrong() == [name]
