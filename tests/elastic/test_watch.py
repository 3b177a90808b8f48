"""Who is stuck, of processes that say what they are at."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdist.elastic.status import BEAT_SECONDS, Publisher, Status, read_status
from jaxdist.elastic.watch import Patience, find_stuck
from jaxdist.metrics.account import Kind

NOW = 1000.0
PATIENCE = Patience(silent_seconds=10.0, step_seconds=60.0)


def status(process: int, step: int, phase: Kind, ago: float, silent: float = 0.1) -> Status:
    return Status(process, 100 + process, step, phase, NOW - ago, NOW - silent)


def found(*statuses: Status) -> int | None:
    stuck = find_stuck(statuses, NOW, PATIENCE)
    return None if stuck is None else stuck.process


def test_the_silent_one_is_named():
    """It was stopped at a step; the others wait for it, and say so."""
    others = [status(at, 7, Kind.STEP, 12.0) for at in (0, 2)]
    assert found(*others, status(1, 7, Kind.STEP, 12.0, silent=11.0)) == 1
    assert found(*others, status(1, 7, Kind.STEP, 12.0, silent=9.0)) is None


@pytest.mark.parametrize(
    ("statuses", "stuck"),
    [
        ([(8, Kind.STEP, 70), (7, Kind.STEP, 80), (8, Kind.STEP, 70)], 1),
        ([(8, Kind.STEP, 70), (8, Kind.STEP, 71), (8, Kind.INPUT_WAIT, 65)], 2),
        ([(8, Kind.STEP, 70), (8, Kind.STEP, 75), (8, Kind.STEP, 71)], 1),
        ([(8, Kind.STEP, 70), (8, Kind.STEP, 75), (9, Kind.STEP, 3)], None),
        ([(-1, Kind.COMPILE, 900), (-1, Kind.COMPILE, 900)], None),
        ([], None),
    ],
    ids=["behind", "no_batch", "first", "one_goes_on", "compiling", "nobody"],
)
def test_all_live_and_none_gets_on(statuses, stuck):
    given = [status(at, *one) for at, one in enumerate(statuses)]
    assert found(*given) == stuck


def test_who_does_not_wait_as_the_others_do_is_named():
    """It is within a step too, in its own code, and got there after the others began to wait."""
    waiting = [replace(status(at, 8, Kind.STEP, 90.0), waiting=True) for at in (0, 2)]
    assert found(*waiting, status(1, 8, Kind.STEP, 70.0)) == 1


def test_what_a_process_says_is_read(tmp_path: Path):
    path = tmp_path / "status"
    assert read_status(path) is None
    with Publisher(path, 3) as publisher:
        publisher.phase(Kind.STEP)
        publisher.step(12)
        first = read_status(path)
        assert first is not None
        assert (first.process, first.step, first.phase) == (3, 12, Kind.STEP)
        deadline = time.monotonic() + 60
        while (again := read_status(path)) is None or again.alive == first.alive:
            assert time.monotonic() < deadline
            time.sleep(BEAT_SECONDS / 10)
        assert again.since == first.since
