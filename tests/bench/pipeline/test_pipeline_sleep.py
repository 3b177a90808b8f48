"""The executor whose tasks sleep: every pass sleeps once, and no two of a stage at a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections import Counter

import pytest
from rich.console import Console

from benchmarks.core import child
from benchmarks.pipeline import sleep as pipeline_sleep
from benchmarks.pipeline.sleep import BUILDS, UNITS, Slept, play, sleeping
from jaxdist.errors import RunError
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.pipeline_schedules.schedule import TaskKind

SLEPT = [
    Slept("1f1b", 4, 8, 22, 1.02, 1.0, 0.8),
    Slept("zb_h1", 4, 8, 27, 0.9, 1.0, 0.8),
    Slept("zb_h1", 8, 16, 55, 2.08, 2.0, 1.9),
]


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.every(3)
def test_a_step_sleeps_its_ticks(name):
    """No less than a time line without ticks: a sleep never ends early, and nor do its waits."""
    found = play(name, 2, unit_seconds=8e-3, repeats=1)
    assert found.wall_seconds >= found.time_line_seconds > 0
    assert found.lock_step_seconds >= found.time_line_seconds
    assert (found.stages, found.microbatches) == (2, 4)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.every(3)
def test_every_pass_sleeps_once(monkeypatch, name):
    slept = []
    monkeypatch.setattr(pipeline_sleep.time, "sleep", slept.append)
    ticks = lower(BUILDS[name](2, 4), activations="stash")
    program = sleeping(ticks, 2.0)
    slept.clear()
    program()
    kinds = (TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT)
    assert Counter(slept) == {2 * UNITS[kind]: 4 * ticks.chunks for kind in kinds}


def test_a_whole_backward_task_sleeps_for_both_halves():
    assert UNITS[TaskKind.FULL] == UNITS[TaskKind.INPUT] + UNITS[TaskKind.WEIGHT]


def test_too_fast_is_as_far_apart_as_too_slow():
    four, eight = pipeline_sleep.figures(SLEPT)
    assert four.ratio == pytest.approx(1 / 0.9)
    assert four.holds is False
    assert four.note.endswith("the worst of 2 schedules is zb_h1")
    assert (eight.ratio, eight.holds) == (1.04, True)


def test_the_listing_fits_80_columns():
    listing = pipeline_sleep.listing([dataclasses.replace(SLEPT[0], name="1f1b, ahead"), *SLEPT])
    assert listing.rows[1] == ("1f1b", 4, 8, 22, 1.02, 1.0, "1.020", 0.8)
    assert Console(width=80).measure(listing.table()).maximum <= 80


def test_each_number_of_stages_has_a_process(monkeypatch):
    seen = []

    def run(command, env, timeout, **_):
        seen.append(
            (command[1:], env["XLA_FLAGS"].rpartition("device_count=")[2].split()[0], timeout)
        )
        count = int(command[-1])
        text = json.dumps([dataclasses.asdict(one) for one in SLEPT if one.stages == count])
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert pipeline_sleep.measure() == SLEPT
    assert seen == [
        (
            [
                "-P",
                "-m",
                "benchmarks.core.child",
                "benchmarks.pipeline.sleep:play_all",
                count,
            ],
            count,
            child.TIMEOUT_SECONDS,
        )
        for count in ("4", "8")
    ]


def test_it_always_ends(monkeypatch):
    monkeypatch.setattr(child, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"a pipeline of 4 stages that sleep is not done after 0.01"):
        pipeline_sleep.measure((4,))


def test_every_schedule_is_played(monkeypatch):
    monkeypatch.setattr(pipeline_sleep, "play", lambda name, stages: SLEPT[0])
    assert [*pipeline_sleep.play_all(4)] == [SLEPT[0]] * len(BUILDS)
