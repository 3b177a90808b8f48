"""Generations of an agent, whose processes are small scripts in place of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdist.elastic import team
from jaxdist.elastic.agent import Agent, AgentSettings, exit_of
from jaxdist.elastic.assignment import Assignment, Hosts, SingleHost
from jaxdist.elastic.team import Team
from jaxdist.elastic.watch import StuckTimeouts
from jaxdist.errors import ConfigError, RunError
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import read_journal
from jaxdist.heartbeat.status import Status
from jaxdist.run.report.goodput import uncopied_lines

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from jaxdist.checkpoint.identity import Identity
from jaxdist.heartbeat.run_folder import run_folder_of
from jaxdist.heartbeat.status import Publisher
from jaxdist.metrics.account import Activity
from jaxdist.runtime.forks import await_fork, hold_signals

hold_signals()
if not await_fork():
    sys.exit()
line = sys.stdin.readline()
if not line:
    sys.exit()
order = json.loads(line)
os.environ.update(order["environ"])
args, index = order["args"], int(os.environ.get("JAX_PROCESS_ID", "0"))
place = run_folder_of(os.environ)
if index == 0:
    assert args["run"]["path"] == (args["at"] if args["resume"] else None)
    place.tell_run(Identity(args["run"]["id"], Path(args["at"])))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # as a run that has saved
with Publisher(place.status(index), index) as publisher:
    publisher.phase(Activity.STEP)
    first = 0 if args["same"] else 10 * (place.generation - 1)
    for step in range(first, first + 10):
        publisher.step(step)
        time.sleep(0.005)
    exec(args["then"])
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The exit code of a run whose processes do something at their tenth step, and its lines."""
    (tmp_path / "a_fork_server.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def start(
        then: str,
        *,
        same: bool = False,
        hosts: Hosts | None = None,
        said: list[str] | None = None,
        **plan: object,
    ) -> tuple[int, list[str]]:
        said = [] if said is None else said
        args = {"at": str(tmp_path), "then": then, "same": same}
        # A process that the machine gives no core for a while is not stopped.
        given = {"processes": 3, "stuck_timeouts": StuckTimeouts(silent_seconds=30.0), **plan}
        record = partial(Recorder, draw=False)
        agent = Agent(
            AgentSettings(args, **given),
            said.append,
            hosts=hosts,
            record=record,
            fork_module="a_fork_server",
        )
        return agent.run(), said

    return start


def journal(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "elastic.jsonl").read_text().splitlines()
    return [(one["generation"], one["event"]) for one in map(json.loads, lines)]


def test_a_killed_process_is_followed_by_a_generation(run, tmp_path: Path):
    then = """
if place.generation < 3 and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if place.generation < 3:
    time.sleep(60)  # as who waits in a collective
assert args["resume"] == (place.generation > 1)
"""
    code, said = run(then)
    assert code == 0
    assert [line.split(":")[0] for line in said] == [
        "process 1 of 3 ended (signal SIGKILL), at step 9",
        "process 1 of 3 ended (signal SIGKILL), at step 19",
    ]
    events = journal(tmp_path)
    assert [one for one in events if one[1] == "lost"] == [(1, "lost"), (2, "lost")]
    for generation in (1, 2):
        record = json.loads((tmp_path / f"flight_{generation}.json").read_text())
        assert (record["process"], record["how"]) == (1, "ended (signal SIGKILL)")
        dead = record["processes"][1]
        assert (dead["step"], dead["phases"][-1]["phase"]) == (10 * generation - 1, "step")


@pytest.mark.full
def test_a_process_that_is_stopped_is_named_and_ended(run, tmp_path: Path):
    then = """
if place.generation == 1:
    if index == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""
    code, said = run(then, stuck_timeouts=StuckTimeouts(silent_seconds=1.0))
    assert code == 0
    assert said[0].startswith("process 2 of 3 has sent no heartbeat for 1 s, at step 9")
    lines = map(json.loads, (tmp_path / "elastic.jsonl").read_text().splitlines())
    (stuck,) = (one for one in lines if one["event"] == "stuck")
    assert stuck["process"] == 2
    assert [one["step"] for one in stuck["processes"]] == [9, 9, 9]


@pytest.mark.full
def test_who_has_ended_while_the_agent_was_away_is_not_stuck(run, monkeypatch: pytest.MonkeyPatch):
    """It may get no core for a while, between its look at who lives and at what they say."""
    looked, away = Team._statuses, iter([1.5])

    def late(*args: object) -> list[Status]:
        if len(found := looked(*args)) < 3:
            return found
        time.sleep(next(away, 0))
        return looked(*args)

    monkeypatch.setattr(Team, "_statuses", late)
    assert run("", stuck_timeouts=StuckTimeouts(silent_seconds=1.0)) == (0, [])


def test_losses_without_a_new_step_end_it(run):
    then = 'sys.stderr.write("broken"); sys.stderr.flush(); os._exit(3)'
    with pytest.raises(RunError, match=r"2 consecutive generations .* process 0 ended .*broken"):
        run(then, same=True, restarts=2, processes=1)


def test_what_only_a_person_can_mend_is_not_tried_again(run):
    then, said = 'sys.stderr.write("error: no such key"); sys.stderr.flush(); os._exit(2)', []
    with pytest.raises(ConfigError, match=r"^no such key$"):
        run(then, processes=1, said=said)
    assert not said  # that another generation begins, least of all


@pytest.mark.full
def test_a_signal_is_passed_on_and_ends_it(run, tmp_path: Path):
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(2.0, stop)
    timer.start()
    code, said = run("time.sleep(60)")
    timer.join()
    assert (code, said) == (75, [])


class Others(SingleHost):
    """As if there were other hosts: a run that stops before its end goes on elsewhere."""

    left = False

    def over(self, assignment: Assignment) -> bool:
        return assignment.generation > 1

    def why(self, assignment: Assignment) -> str:
        return "b leaves"

    def leave(self) -> None:
        self.left = True


class Uncopied(SingleHost):
    """As if another host could not be copied from when it is first asked, and 1.5 s long."""

    asked, copied = float("inf"), 0

    def __init__(self, processes: int, folder: Path) -> None:
        super().__init__(processes)
        self.folder = folder

    def uncopied(self) -> str | None:
        self.asked = min(self.asked, time.monotonic())
        if time.monotonic() < self.asked + 1.5:
            return "the snapshots of b cannot be copied at present"
        self.copied += 1
        if self.copied == 2:  # what came of the first answer is written down
            (self.folder / "copied").touch()
        return None

    def named(self) -> dict[str, str]:
        return {"host": "a"}


@pytest.mark.full
def test_a_host_that_makes_no_copies_is_in_the_report(run, tmp_path: Path):
    then = 'while not Path(args["at"], "copied").exists(): time.sleep(0.01)'
    assert run(then, hosts=Uncopied(1, tmp_path), processes=1) == (0, [])
    events = [event for event in read_journal(tmp_path) if event["event"] != "begun"]
    assert [(event["event"], event["host"]) for event in events] == [
        ("uncopied", "a"),
        ("copied", "a"),
    ]
    (line,) = uncopied_lines(events)
    told = "copies generation 1, a: the snapshots of b cannot be copied at present"
    seconds = events[1]["time"] - events[0]["time"]
    assert line == f"{told}; the copies were made again after {seconds:.0f} s"
    assert seconds > 1
    (line,) = uncopied_lines(events[:1])
    assert line == told


NOTICED = """
if place.generation == 1:
    if index == 1 and {mine}:
        place.notice.write_text("SIGUSR1")
    time.sleep(0.2)
    sys.exit(75)
"""


def test_a_host_whose_process_was_told_takes_part_no_more(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(team, "LOOK_SECONDS", 60.0)  # it is told, and ends, between two looks
    hosts = Others(2)
    assert run(NOTICED.format(mine=True), hosts=hosts, processes=2) == (75, [])
    assert hosts.left


def test_a_host_whose_processes_stop_because_another_leaves_goes_on(
    run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(team, "LOOK_SECONDS", 60.0)  # the last step is between two looks
    hosts = Others(2)
    code, said = run(NOTICED.format(mine=False), hosts=hosts, processes=2)
    assert (code, said) == (0, ["generation 1 ended, at step 9: b leaves"])
    assert not hosts.left


@pytest.mark.parametrize(
    ("told", "stopped", "members", "over", "code"),
    [
        (True, True, 2, False, 75),
        (True, False, 2, True, 0),  # its last step came first
        (True, False, 0, False, 75),  # a host that waits
        (False, True, 2, False, None),  # another host was told
        (False, True, 2, True, 75),  # a machine alone: its processes were told
        (False, False, 2, True, 0),
        (False, False, 2, False, None),
    ],
)
def test_who_takes_part_again(told, stopped, members, over, code):
    given = {"stopped": stopped, "members": members * [object()]}
    assert exit_of(asked=told, team=SimpleNamespace(**given), over=over) == code


IMPORTS = """
import os, sys, time
from jaxdist.cli import runs
runs.import_all()
before = {name.partition(".")[0] for name in sys.modules}
options = ["run.directory=run", "train.steps=2"]
runs.train_process(sys.argv[1], options, begun=time.perf_counter_ns())
late = {name.partition(".")[0] for name in sys.modules} - before
print("late", *sorted(late & {"orbax", "grain", "tensorboardX", "tensorstore", "optax", "flax"}))
"""


@pytest.mark.slow
def test_a_process_that_waits_has_imported_what_a_run_needs(tmp_path: Path):
    """It would import it in each recovery, on all processes at once."""
    told = {
        "model": {"type": "mlp", "hidden": [8]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"batch_size": 8},
        "eval": {"every": None},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(told))
    (tmp_path / "imports.py").write_text(IMPORTS)
    done = subprocess.run(
        [sys.executable, "imports.py", "config.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == "late", done
