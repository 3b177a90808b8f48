"""Failures on purpose: where they come, and what a run should keep of its time."""

from __future__ import annotations

import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.checkpoint.identity import Identity
from jaxdist.elastic.drill import Strike, Striker, every_of, judge_drill, recoveries_of, strikes_of
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.saving import RECOVERY
from jaxdist.heartbeat.status import Status
from jaxdist.metrics.account import Activity
from jaxdist.metrics.goodput import Goodput, Life

KILL, STOP = Strike(100, 1, stops=False), Strike(150, 0, stops=True)


@given(
    failures=st.integers(1, 20),
    steps=st.integers(400, 10**6),
    processes=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_strikes_are_the_seed_s_and_spread_over_the_run(failures, steps, processes, seed):
    found = strikes_of(failures, steps, processes, seed)
    assert found == strikes_of(failures, steps, processes, seed)
    assert len(found) == failures
    assert all(a.step <= b.step for a, b in pairwise(found))
    assert all(0.1 * steps <= one.step <= 0.95 * steps + 1 for one in found)
    assert all(0 <= one.process < processes for one in found)
    assert not found[0].stops


def test_another_seed_strikes_elsewhere():
    assert strikes_of(3, 1000, 4, seed=1) != strikes_of(3, 1000, 4, seed=2)


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_strike_waits_for_its_step_and_for_a_generation_that_works(tmp_path: Path, victim):
    run_folder = RunFolder(tmp_path, 1)
    run_folder.tell_run(Identity("a1", tmp_path / "run"))
    striker = Striker(Journal(), pytest.fail, [KILL, STOP])

    def look(step: int) -> None:
        now = time.monotonic()
        pids = {0: 0, 1: victim.pid}
        striker.look(
            run_folder, [Status(at, pid, step, Activity.STEP, now, now) for at, pid in pids.items()]
        )

    look(100)  # it has not begun
    striker.begun()
    look(99)
    assert (victim.poll(), striker.struck) == (None, [])
    look(100)
    assert victim.wait(60) == -signal.SIGKILL
    assert (striker.left, len(striker.struck)) == ([STOP], 1)
    look(150)  # the next strike is for the next generation
    assert striker.left == [STOP]
    assert striker.run == tmp_path / "run"


def life(number: int, began: float, steps: tuple[int, int, int], **seconds: float) -> Life:
    spent = {kind: seconds.get(kind.value, 0.0) for kind in Activity}
    return Life(number, began, *steps, spent)


def test_what_a_run_should_keep():
    """A step takes 0.1 s, a snapshot each 10 steps 0.01 s; the first failure costs 5 s, of which
    0.5 s are 5 steps that were taken again; the other, which was silent for 10 s, 16."""
    lives = (
        life(1, 0.0, (0, 105, 100), start=3.0, step=10.0, snapshot=0.1, lost_work=0.5),
        life(2, 17.5, (100, 155, 150), recovery=1.0, step=5.0, snapshot=0.05, lost_work=0.5),
        life(3, 39.0, (150, 200, 200), recovery=1.0, step=5.0, snapshot=0.05),
    )
    parts = {f"{part}_seconds": 1.0 for part in RECOVERY}
    events = [
        {"event": "begun", "generation": 1, "time": 4.0, **parts},
        {"event": "lost", "generation": 1, "time": 14.1, "step": 105},
        {"event": "begun", "generation": 2, "time": 19.0, **parts},
        {"event": "lost", "generation": 2, "time": 35.0, "step": 155},
        {"event": "begun", "generation": 3, "time": 40.0, **parts},
    ]
    found = Goodput(lives)
    recoveries = recoveries_of([KILL, STOP], [14.0, 24.0], events, found)
    assert [one.seconds for one in recoveries] == [5.0, 16.0]
    assert [one.parts["detect"] for one in recoveries] == [1.0, 12.0]
    assert [one.lost_steps for one in recoveries] == [5, 5]
    drilled = judge_drill(recoveries, found, every=10, silent_seconds=10.0)
    # 20 s of work, 0.2 s of saves, two failures of 4.5 s and half an interval, one silent for 10 s
    assert drilled.predicted == pytest.approx(20 / (20 + 0.2 + 2 * (4.5 + 0.5) + 10))
    # What it did: 20 s of work; saves, work lost, restarts, and the gaps between lives
    taken = 0.2 + 1.0 + 2.0 + found.gaps_seconds[0] + found.gaps_seconds[1]
    assert drilled.achieved == pytest.approx(20 / (20 + taken))
    assert drilled.held == (drilled.achieved >= 0.9 * drilled.predicted)
    told = drilled.lines()
    assert told[1].startswith("step     150 process 0 SIGSTOP   16.00 s = detect 12.00 + stop 1.00")


@pytest.mark.parametrize(
    ("memory", "disk", "every"),
    [(10, 500, 10), (None, 500, 500), ("auto", 500, 34), (None, "auto", 70)],
)
def test_saves_that_a_failure_goes_back_to(memory, disk, every):
    records = [
        {"split": "train", "loss": 1.0},
        {"split": "intervals", "snapshot_steps": 7.0},
        {"split": "intervals", "checkpoint_blocked_steps": 70.0},
        {"split": "intervals", "snapshot_steps": 34.0},
    ]
    assert every_of(records, memory, disk) == every
