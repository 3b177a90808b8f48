"""Who is stuck, of processes that say what they are at."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdist.elastic.hosts import remote_progress
from jaxdist.elastic.watch import StuckTimeouts, find_stuck
from jaxdist.errors import RunError
from jaxdist.heartbeat.status import BEAT_SECONDS, Publisher, Status, read_status
from jaxdist.metrics.account import Activity

NOW = 1000.0
PATIENCE = StuckTimeouts(silent_seconds=10.0, step_seconds=60.0)


def status(process: int, step: int, phase: Activity, ago: float, silent: float = 0.1) -> Status:
    return Status(process, 100 + process, step, phase, NOW - ago, NOW - silent)


def found(*statuses: Status) -> int | None:
    stuck = find_stuck(statuses, NOW, PATIENCE)
    return None if stuck is None else stuck.process


def test_the_silent_one_is_named():
    """It was stopped at a step; the others wait for it, and say so."""
    others = [status(at, 7, Activity.STEP, 12.0) for at in (0, 2)]
    assert found(*others, status(1, 7, Activity.STEP, 12.0, silent=11.0)) == 1
    assert found(*others, status(1, 7, Activity.STEP, 12.0, silent=9.0)) is None


@pytest.mark.parametrize(
    ("statuses", "stuck"),
    [
        ([(8, Activity.STEP, 70), (7, Activity.STEP, 80), (8, Activity.STEP, 70)], 1),
        ([(8, Activity.STEP, 70), (8, Activity.STEP, 71), (8, Activity.INPUT_WAIT, 65)], 2),
        ([(8, Activity.STEP, 70), (8, Activity.STEP, 75), (8, Activity.STEP, 71)], 1),
        ([(8, Activity.STEP, 70), (8, Activity.STEP, 75), (9, Activity.STEP, 3)], None),
        ([(-1, Activity.COMPILE, 900), (-1, Activity.COMPILE, 900)], None),
        ([], None),
    ],
    ids=["behind", "no_batch", "first", "one_goes_on", "compiling", "nobody"],
)
def test_all_live_and_none_gets_on(statuses, stuck):
    given = [status(at, *one) for at, one in enumerate(statuses)]
    assert found(*given) == stuck


def test_who_does_not_wait_as_the_others_do_is_named():
    """It is within a step too, in its own code, and got there after the others began to wait."""
    waiting = [replace(status(at, 8, Activity.STEP, 90.0), waiting=True) for at in (0, 2)]
    assert found(*waiting, status(1, 8, Activity.STEP, 70.0)) == 1


def test_what_a_process_says_is_read(tmp_path: Path):
    path = tmp_path / "status"
    assert read_status(path) is None
    with Publisher(path, 3) as publisher:
        publisher.phase(Activity.STEP)
        publisher.step(12)
        first = read_status(path)
        assert first is not None
        assert (first.process, first.step, first.phase) == (3, 12, Activity.STEP)
        deadline = time.monotonic() + 60
        while (again := read_status(path)) is None or again.alive == first.alive:
            assert time.monotonic() < deadline
            time.sleep(BEAT_SECONDS / 10)
        assert again.since == first.since


def named_by(own: list[Status], remote_progress: list[Status] | None) -> int | None:
    stuck = find_stuck(own, NOW, PATIENCE, lambda: remote_progress)
    return None if stuck is None else stuck.process


def test_each_machine_names_only_its_own_that_all_wait_for():
    waits = replace(status(0, 8, Activity.STEP, 70.0), waiting=True)
    behind = status(1, 8, Activity.INPUT_WAIT, 71.0)
    assert named_by([waits], [behind]) is None
    assert named_by([behind], [waits]) == 1
    evaluates = status(1, 8, Activity.EVALUATION, 71.0)  # while the others wait: it is named
    assert (named_by([waits], [evaluates]), named_by([evaluates], [waits])) == (None, 1)


def test_others_that_get_on_or_are_not_known_name_nobody():
    behind = status(1, 8, Activity.INPUT_WAIT, 71.0)
    assert named_by([behind], None) is None
    assert named_by([behind], [status(0, 9, Activity.STEP, 3.0)]) is None


def test_others_are_asked_only_where_processes_wait_for_long():
    def asked() -> list[Status]:
        raise AssertionError

    assert find_stuck([status(0, 8, Activity.STEP, 50.0)], NOW, PATIENCE, asked) is None
    silent = status(0, 8, Activity.STEP, 50.0, silent=11.0)
    assert find_stuck([silent], NOW, PATIENCE, asked) is not None


def test_ages_go_from_host_to_host():
    """The clock of the one that tells shows something else; a message ages while it lies there."""
    theirs = [replace(status(3, 8, Activity.STEP, 60.0, silent=2.0), waiting=True)]
    facts = {"progress": remote_progress.encode_progress(5, theirs, NOW)}
    said = {"own-1": {"number": 1, "facts": {}}, "b-1": {"number": 7, "facts": facts}}
    remote = remote_progress.RemoteProgress("own-1", 5, 1)
    assert remote.statuses is None
    assert remote.due(20.0)
    remote.read(said, 20.0)
    assert not remote.due(20.5)
    assert remote.statuses == [Status(3, 0, 8, Activity.STEP, -40.0, 18.0, waiting=True)]
    remote.read(said, 30.0)  # the same message
    assert remote.statuses == [Status(3, 0, 8, Activity.STEP, -40.0, 18.0, waiting=True)]
    remote.read({"b-1": {"number": 8, "facts": facts}}, 30.0)
    assert remote.statuses == [Status(3, 0, 8, Activity.STEP, -30.0, 28.0, waiting=True)]


@pytest.mark.parametrize(("generation", "processes"), [(6, 1), (5, 2)])
def test_what_is_of_another_generation_or_not_all_tells_nothing(generation, processes):
    facts = {
        "progress": remote_progress.encode_progress(5, [status(3, 8, Activity.STEP, 60.0)], NOW)
    }
    remote = remote_progress.RemoteProgress("own-1", generation, processes)
    remote.read({"b-1": {"number": 1, "facts": facts}}, 0.0)
    assert remote.statuses is None


def test_memory_that_is_full_is_told(tmp_path: Path):
    (tmp_path / "full").touch()
    words = r"status_1 in shared memory cannot be written: Not a directory; free some memory"
    with pytest.raises(RunError, match=words):
        Publisher(tmp_path / "full" / "status_1", 1)
