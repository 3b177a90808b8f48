"""What processes were at before a generation was lost, and who was slow."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from jaxdist.checkpoint.identity import Identity
from jaxdist.heartbeat.flight.picture import flight_figure
from jaxdist.heartbeat.flight.recorder import LOOK_SECONDS, Recorder, flight_record
from jaxdist.heartbeat.flight.slow import Flight, find_slow
from jaxdist.heartbeat.journal import Journal, read_journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import RING, Phase, Publisher, Status, read_flight, read_status
from jaxdist.metrics.account import Activity
from jaxdist.run.report.goodput import slow_lines

MS = 1_000_000
STEP = 50.0


def test_the_last_phases_are_kept_and_outlive_who_wrote_them(tmp_path: Path):
    path = tmp_path / "status"
    assert read_flight(path) is None
    steps = RING  # three phases each, so that the ring goes around three times
    with Publisher(path, 3) as publisher:
        for step in range(1, steps + 1):
            publisher.phase(Activity.INPUT_WAIT)
            publisher.phase(Activity.STEP)
            publisher.wait()
            publisher.step(step)
        publisher.wait()
    found = read_flight(path)
    assert found is not None
    status, phases = found
    assert (status.process, status.step, status.waiting) == (3, steps, True)
    assert len(phases) == RING
    assert [one.name for one in phases[-5:]] == ["input_wait", "step", "wait", "step", "wait"]
    assert [one.step for one in phases if one.name == "wait"][-2:] == [steps, steps]
    assert all(a.end == b.begin for a, b in pairwise(phases))
    assert read_status(path) == status


def flight(process: int, *, own: float = 2.0, behind: float = 0.0, late: int = 0) -> Flight:
    """40 steps of `STEP` ms, of which `own` ms of input are outside of the wait.

    Args:
      behind: ms after the others that it sees each done; without it nobody is always the last.
    """
    rng, phases = random.Random(process), []
    for step in range(40):
        end = STEP * step + (behind or rng.random())
        begin = STEP * (step - 1) + (behind or 0.5)
        at = [round(MS * one) for one in (begin, begin + own, end)]
        phases.append(Phase("input_wait", step - 1, at[0], at[1] - at[0]))
        phases.append(Phase("wait", step, at[1], at[2] - at[1]))
    return Flight(process, [*phases, Phase("wait", 39, phases[-1].end, 0)], 100, late)


def test_equal_processes_are_not_slow():
    assert find_slow([flight(at) for at in range(4)]) == []
    assert find_slow([flight(0), flight(1)]) == []


@pytest.mark.parametrize("others", [1, 2, 7])
def test_who_takes_long_outside_of_its_wait(others: int):
    (slow,) = find_slow([*(flight(at) for at in range(others)), flight(9, own=20.0)])
    assert (slow.process, slow.step) == (9, 39)
    assert slow.ratio == pytest.approx(10, rel=0.1)
    assert slow.words().startswith(
        "process 9 is 10 times as slow as the other processes: 20 ms of work"
    )
    assert re.search(r"of the other processes is (2|1\.99) ms; the phase", slow.why)
    assert slow.why.endswith("difference is input wait")


def test_little_more_is_not_told():
    assert find_slow([flight(0), flight(1), flight(9, own=2.0 + 0.08 * STEP)]) == []


def test_who_does_not_run_for_a_part_of_the_time():
    (slow,) = find_slow([flight(0, late=2), flight(1), flight(2, late=50)])
    assert (slow.process, slow.least) == (2, True)
    assert slow.ratio == pytest.approx(1.98, rel=0.01)
    # A machine that is too small for all of them names nobody.
    assert find_slow([flight(0, late=45), flight(1, late=50), flight(2, late=55)]) == []


def test_who_is_the_last_at_each_step():
    (slow,) = find_slow([flight(0), flight(1), flight(2), flight(3, behind=10.5)])
    assert (slow.process, slow.least) == (3, True)
    assert slow.ratio == pytest.approx(STEP / (STEP - 10), rel=0.02)
    assert slow.why.startswith(
        "the process finished last in 100% of the steps, on average 9.97 ms after the others in a "
        "step of 50"
    )


def test_too_little_is_known_of_some():
    few = Flight(9, flight(9, own=20.0).phases[:20])
    assert find_slow([flight(0), flight(1), few]) == []
    assert find_slow([flight(9, own=20.0)]) == []
    assert find_slow([]) == []


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch):
    """Writes what a process would have said of itself, had it had these phases."""
    now = [0]

    def write_one(run_folder: RunFolder, given: Flight) -> Status:
        with (
            monkeypatch.context() as patched,
            Publisher(run_folder.status(given.process), given.process) as publisher,
        ):
            patched.setattr("jaxdist.heartbeat.status.time.monotonic_ns", lambda: now[0])
            for one in given.phases:
                now[0] = one.begin
                if one.name == "wait":
                    publisher.wait()
                    now[0] = one.end
                    publisher.step(one.step)
                else:
                    publisher.phase(Activity.INPUT_WAIT)
        found = read_status(run_folder.status(given.process))
        assert found is not None
        return found

    return write_one


def test_who_is_slow_at_two_looks_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write
):
    said: list[str] = []
    now = [0.0]
    run_folder = RunFolder(tmp_path, 2)
    run_folder.tell_run(Identity("a1", tmp_path))
    recorder = Recorder(Journal(), said.append, draw=False)
    statuses = [write(run_folder, flight(at, own=20.0 if at == 2 else 2.0)) for at in range(3)]
    monkeypatch.setattr("jaxdist.heartbeat.flight.recorder.time.monotonic", lambda: now[0])
    for look in range(5):
        now[0] = look * (LOOK_SECONDS + 1)
        recorder.look(run_folder, statuses)
        assert len(said) == (0 if look < 2 else 1)
    assert said[0].startswith("process 2 is 9.53 times as slow")
    (event,) = read_journal(tmp_path)
    assert (event["event"], event["process"], event["generation"]) == ("slow", 2, 2)
    (line,) = slow_lines([event])
    assert line.startswith("slow   generation 2, step 39: process 2 is 9.53 times as slow")


@pytest.mark.full
def test_a_record_and_its_picture(tmp_path: Path, write):
    run_folder = RunFolder(tmp_path, 4)
    run_folder.tell_run(Identity("a1", tmp_path))
    for at in range(2):
        write(run_folder, flight(at))
    record = flight_record(run_folder, 1, "ended (signal SIGKILL)", range(3))
    told = record["processes"][0]["phases"]
    assert [one["phase"] for one in told[-5:]] == ["input_wait", "wait", "step", "wait", "step"]
    assert told[-4]["seconds"] == pytest.approx(0.0475, abs=0.001)
    assert record["processes"][2]["phases"] == []
    figure = flight_figure(record)
    (axes,) = figure.axes
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        *("process 0, step 39", "process 1, step 39", "process 2, step None"),
    ]
    assert "process 1 ended" in axes.get_title("left")
    recorder = Recorder(Journal(), lambda line: None)
    run_folder.run.unlink()
    recorder.lost(run_folder, 1, "ended", range(3))  # before any process has told where the run is
    assert not (tmp_path / "flight_4.json").exists()
    run_folder.tell_run(Identity("a1", tmp_path))
    recorder.begun()
    recorder.close()
    assert json.loads((tmp_path / "flight_4.json").read_text())["process"] == 1
    assert (tmp_path / "flight_4.png").stat().st_size > 1000
