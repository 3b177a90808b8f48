"""Agents of several hosts on this machine, whose processes are small scripts that do not train.

The program `python elastic_hosts.py JSON` runs the agent of one host. Each process appends the
settings that it received to the file MARKS. It then takes a step every few milliseconds until the
file END exists, and exits with code 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warm import Process

MARKS, END, CRASH = "marks", "end", "crash"
SECONDS = 60.0
ELASTIC = {"lease_seconds": 3.0, "settle_seconds": 0.3, "stuck_host_seconds": 1.0}
"""Leases that are long enough for a loaded machine; a host that loses its lease returns soon."""

PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
from jaxdist.checkpoint.identity import Identity, write_identity
from jaxdist.heartbeat.run_folder import run_folder_of
from jaxdist.heartbeat.status import Publisher
from jaxdist.metrics.account import Activity
from jaxdist.runtime.forks import await_fork, hold_signals

agent = os.getppid()  # read before the fork, after which the parent is another process
hold_signals()
if not await_fork():
    sys.exit()
line = sys.stdin.readline()
if not line:
    sys.exit()
order = json.loads(line)
os.environ.update(order["environ"])
index = int(os.environ.get("JAX_PROCESS_ID", "0"))
place, folder = run_folder_of(os.environ), Path(sys.argv[0]).parent
run = Identity(order["args"]["run"]["id"], folder)
if index == 0:
    place.tell_run(run)
    (folder / "run.json").unlink(missing_ok=True)  # each run of a test has this folder
    write_identity(folder, run)
place.snapshots.mkdir(exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # the exit code of a run that has saved
count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
told = {
    "generation": place.generation, "index": index, "count": count, "pid": os.getpid(),
    "agent": agent, "parts": sorted(path.name for path in place.snapshots.iterdir()),
    "address": os.environ.get("JAX_COORDINATOR_ADDRESS"), "fence": place.fence,
    "snapshots": str(place.snapshots), **order["args"],
}
with (folder / "marks").open("a") as file:
    file.write(json.dumps(told) + "\\n")
with Publisher(place.status(index), index) as publisher:
    publisher.phase(Activity.STEP)
    step = 100 * place.generation
    (place.snapshots / f"step_{step:08d}.{index}_of_{count}").write_text(f"{index}")
    while not (folder / "end").exists():
        step += 1
        publisher.step(step)
        time.sleep(0.005)
        # A single search, so that both conditions below see the same files.
        stuck = {path.name for path in folder.glob(f"stuck-{place.generation}-*")}
        if stuck:
            # A collective keeps real processes at the same step. Each of these processes counts its
            # own steps, so the process that began last would count as the furthest behind, even if
            # another process is stuck.
            publisher.step(100 * place.generation + 99)
        if f"stuck-{place.generation}-{index}" in stuck:
            publisher.phase(Activity.INPUT_WAIT)
            time.sleep(60)
        if stuck:  # like a process that waits in a collective
            publisher.wait()
            time.sleep(60)
        if (folder / f"crash-{place.generation}-{index}").exists():
            sys.stderr.write("error: broken")
            sys.stderr.flush()
            os._exit(int((folder / f"crash-{place.generation}-{index}").read_text()))
place.done.touch()
"""


class Play:
    """The agents of several hosts, which share a folder."""

    def __init__(self, folder: Path, rendezvous: str | None = None, **config: Any) -> None:
        self.folder, self.rendezvous = folder, rendezvous or str(folder / "meet")
        (folder / "a_process.py").write_text(PROCESS)
        self.values = {"elastic": ELASTIC, "train": {"batch_size": 8}, **config}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, name: str, **given: Any) -> subprocess.Popen[str]:
        """Start the agent of a host, and return its process.

        Args:
          name: the name of the host.
          given: further settings of the agent; `values` replaces the config.
        """
        config = self.folder / f"config-{name}.yaml"
        config.write_text(json.dumps(given.pop("values", self.values)))
        told = {"rendezvous": self.rendezvous, "name": name, "config": str(config), **given}
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(told)],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def marks(self) -> list[dict[str, Any]]:
        """Return the settings that each process received, in the order in which they began."""
        path = self.folder / MARKS
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait(self, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Wait until `holds` accepts the marks of the newest generation, and return the marks."""
        deadline = time.monotonic() + SECONDS
        found: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            marks = self.marks()
            newest = max((one["generation"] for one in marks), default=0)
            found = sorted(
                (one for one in marks if one["generation"] == newest), key=lambda one: one["index"]
            )
            if found and len(found) == found[0]["count"] and holds(found):
                return found
            time.sleep(0.02)
        codes = [one.poll() for one in self.started]
        for one in self.started:
            kill(one)
        said = [(code, finish(one)[1]) for code, one in zip(codes, self.started, strict=True)]
        raise AssertionError(f"{found}; {said}")

    def wait_for(self, parts: list[str], marks: list[dict[str, Any]]) -> None:
        """Wait until the folder of snapshots of each process in `marks` has all of `parts`."""
        missing = [Path(one["snapshots"], part) for one in marks for part in parts]
        deadline = time.monotonic() + SECONDS
        while missing := [path for path in missing if not path.exists()]:
            assert time.monotonic() < deadline, missing
            time.sleep(0.02)

    def end(self) -> None:
        """Let all processes exit with code 0."""
        (self.folder / END).touch()

    def kill(self) -> None:
        """Kill the agents that a failed test has left running."""
        for process in self.started:
            kill(process)
            process.communicate()


@contextmanager
def playing(folder: Path, rendezvous: str | None = None, **config: Any) -> Iterator[Play]:
    play = Play(folder, rendezvous, **config)
    try:
        yield play
    finally:
        play.kill()


def begun_by(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    children = [int(line) for line in found.stdout.split()]
    return children + [below for child in children for below in begun_by(child)]


def kill(process: Process) -> None:
    """Kill an agent and all its descendants at the same moment, as if its host were lost."""
    members = begun_by(process.pid)
    with suppress(ProcessLookupError):
        process.kill()
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, out


def main() -> None:
    from jaxdist.cli import shared
    from jaxdist.elastic.hosts.start import agent_of
    from jaxdist.elastic.watch import StuckTimeouts

    told = json.loads(sys.argv[1])
    given = {
        "least": told.get("least", 1),
        "most": told.get("most", 4),
        "processes": told.get("processes", 1),
        "token_file": Path(told["token_file"]) if "token_file" in told else None,
        "seconds": told.get("seconds", 30.0),
    }
    try:
        found = agent_of(
            Path(told["config"]),
            [],
            rendezvous=told["rendezvous"],
            host=f"{told['name']}/127.0.0.1",
            resume=False,
            restarts=3,
            say=lambda line: print(line, flush=True),
            fork_module="a_process",
            **given,
        )
        if "step_seconds" in told:
            stuck_timeouts = StuckTimeouts(step_seconds=told["step_seconds"])
            found.plan = replace(found.plan, stuck_timeouts=stuck_timeouts)
        sys.exit(found.run())
    except Exception as error:
        sys.exit(shared.print_error(error))


if __name__ == "__main__":
    main()
