"""Strict mode between processes, and over a resume on another number of them: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from runs import DIGITS, Jaxdist, checkpoint, metrics, steps

STRICT = {"deterministic": {"type": "strict", "shards": 4}, "zero": {"stage": 1, "whole_below": 9}}
LAST = 24
OPTIMIZED = "--xla_backend_optimization_level=3"
"""As XLA has it: bits must be the same of programs that are optimized."""


def train(jaxdist: Jaxdist, name: str, devices: int, processes: int, *more: Any) -> None:
    peers = ["--processes", processes] if processes > 1 else []
    where = f"run.directory=runs/{name}"
    done = jaxdist.train(where, "--devices", devices, *peers, *more, xla_flags=OPTIMIZED)
    assert done.code == 0, done


def assert_same(jaxdist: Jaxdist, name: str, reference: str) -> None:
    """Equal in what was logged (the loss, norms, evaluation) and in the last checkpoint."""
    run, other = jaxdist.folder / "runs" / name, jaxdist.folder / "runs" / reference
    assert metrics(run) == metrics(other)
    assert steps(run)[-1] == steps(other)[-1] == LAST
    found, expected = checkpoint(run, LAST), checkpoint(other, LAST)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


# Two processes, and four devices of one, are in the run below, one after the other.
@pytest.mark.parametrize("plans", [[(2, 2), (1, 4)], [(2, 1), (1, 2)]], ids=str)
@pytest.mark.slow
def test_processes_have_the_bits_of_one_device(
    jaxdist: Jaxdist, plans: list[tuple[int, int]]
) -> None:
    """Devices of a process, and processes; in one process Eigen has as many threads as devices."""
    jaxdist.config(DIGITS, parallel=STRICT)
    train(jaxdist, "one", 1, 1)
    for devices, processes in plans:
        name = f"{processes}x{devices}"
        train(jaxdist, name, devices, processes)
        assert_same(jaxdist, name, "one")


@pytest.mark.full
def test_a_run_that_shrinks_and_grows_is_the_run_that_does_not(jaxdist: Jaxdist) -> None:
    jaxdist.config(DIGITS, parallel=STRICT)
    train(jaxdist, "one", 1, 1)
    # A constant rate: the run's length does not matter to its first steps.
    train(jaxdist, "moved", 4, 1, "train.steps=8")
    train(jaxdist, "moved", 1, 2, "train.steps=16", "--resume")
    train(jaxdist, "moved", 4, 1, "--resume")
    assert_same(jaxdist, "moved", "one")
