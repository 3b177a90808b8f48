"""The bench of a GPU, as far as a machine without a GPU can run it."""

from __future__ import annotations

import math

import jax
import pytest

from benchmarks import gpu
from jaxdist.runtime.hardware import find_device

TINY = gpu.Case(
    "tiny",
    (
        "data.window=128",
        "train.batch_size=2",
        "model.layers=1",
        "model.embed=32",
        "model.heads=4",
        "model.compute_dtype=float32",
    ),
    "all_named",
)


def test_a_machine_without_a_gpu_has_no_figures() -> None:
    (figure,) = gpu.bench().figures
    assert "the device is a cpu" in figure.note


@pytest.mark.slow
def test_a_case_is_trained_and_compared_with_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_device", lambda kind: find_device("h100"))
    peer, step, memory = gpu.step_figures(TINY, 2, "no torch here")
    assert math.isnan(peer.ours)
    assert "256 tokens a step" in step.note
    assert 0 < step.reference < step.ours
    assert memory.reference > 0


def test_other_gradients_of_a_kernel_are_found() -> None:
    given = [jax.random.normal(jax.random.key(seed), (2, 16, 2, 8)) for seed in range(3)]
    found = gpu.gradient("plain")(*given)
    gpu.check_equal(found, found)
    with pytest.raises(AssertionError):
        gpu.check_equal(found, (*found[:2], 2 * found[2]))
