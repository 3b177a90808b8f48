"""Processes that take train steps on request, each pinned to its own core."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from jaxdist.errors import RunError
from jaxdist.runtime.children import Child, Event, last_lines
from jaxdist.runtime.environment import has_idle_libtpu, plan_environment, plan_tunables
from jaxdist.types import JsonObject

PATIENCE_SECONDS = 300.0
"""The longest wait for one answer; the first answer comes after compilation."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""The start of a process: program and arguments, and additional environment variables."""


@dataclass(frozen=True)
class Team:
    """The processes of one contender, and the queue of their messages."""

    name: str
    children: tuple[Child, ...]
    events: SimpleQueue[Event]

    def take_steps(self, steps: int) -> tuple[float, float]:
        """Take steps; return the slowest process's seconds per step, and the mean last loss.

        Raises:
          RunError: a process has ended, or does not answer in time.
        """
        for child in self.children:
            child.say(steps)
        found = self.answers()
        seconds = max(answer["seconds"] for answer in found) / steps
        return seconds, statistics.mean(answer["loss"] for answer in found)

    def answers(self) -> list[JsonObject]:
        """Wait for an answer of each process, and return the answers by rank.

        Raises:
          RunError: a process has ended, or does not answer in time; other processes may still run.
        """
        found: dict[Child, JsonObject] = {}
        while len(found) < len(self.children):
            try:
                event = self.events.get(timeout=PATIENCE_SECONDS)
            except Empty:
                raise RunError(
                    f"{self.name} says nothing for {PATIENCE_SECONDS:g} s: run it on a quieter "
                    "machine"
                ) from None
            if event.code is not None:
                how = f"exit code {event.code}: {last_lines(event.child.log, 1)}"
                raise RunError(f"{event.child} of {self.name} ended with {how}")
            found[event.child] = event.what
        return [found[child] for child in self.children]


@contextmanager
def start(name: str, commands: Sequence[Command], directory: Path) -> Iterator[Team]:
    """Start a process for each command, each on its own core; kill all when the context ends.

    Args:
      name: the name of the team.
      commands: the command of each process.
      directory: the directory for the output of the processes.
    """
    children, events = list[Child](), SimpleQueue[Event]()
    try:
        for core, (command, variables) in zip(cores(), commands, strict=False):
            rank = len(children)
            log, environ = directory / f"{name} {rank}.txt", {**_environ(), **variables}
            with _only(core):
                begin = partial(_begin, command, environ)
                child = Child(f"process {rank}", begin, log=log, events=events)
            children.append(child)
        yield Team(name, tuple(children), events)
    finally:
        for child in children:
            child.kill()


def _begin(
    command: Sequence[str], environ: Mapping[str, str], socket: int, errors: int
) -> subprocess.Popen[bytes]:
    """Start a process that reads and answers over one socket, in a session of its own."""
    return subprocess.Popen(
        command,
        stdin=socket,
        stdout=socket,
        stderr=errors,
        env={**environ},
        start_new_session=True,
    )


@contextmanager
def started(
    contenders: Iterable[tuple[str, Sequence[Command]]], directory: Path
) -> Iterator[list[Team]]:
    """Start teams one after another, each when the previous is ready; they end with the context.

    Args:
      contenders: the name and the commands of each team.
      directory: the directory for the output of the processes.

    Raises:
      RunError: a team does not get ready.
    """
    with ExitStack() as stack:
        found = []
        for name, commands in contenders:
            team = stack.enter_context(start(name, commands, directory))
            hello = team.answers()
            pinned = [answer["cores"] for answer in hello]
            assert pinned == [[core] for core in cores()[: len(hello)]], (name, pinned)
            found.append((team, {answer["params"] for answer in hello}))
        assert len(set.union(*(params for _, params in found))) == 1, found
        yield [team for team, _ in found]


def one_round(teams: Sequence[Team], steps: int, index: int) -> dict[str, float]:
    """Return each team's seconds per step; the team that begins changes from round to round."""
    first = index % len(teams)
    return {team.name: team.take_steps(steps)[0] for team in (*teams[first:], *teams[:first])}


def cores() -> list[int]:
    """Return the cores on which this process may run."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def _only(core: int) -> Iterator[None]:
    """Pin this thread to one core, which the processes that it starts inherit."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _environ() -> dict[str, str]:
    """Return the environment of a process, with the CPU backend and jaxdist's malloc settings."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    planned = plan_environment(kept, fake_devices=None, idle_libtpu=has_idle_libtpu())
    environ = {**kept, **planned, "JAX_PLATFORMS": "cpu"}
    environ["JAX_TRACEBACK_FILTERING"] = "off"  # the last line of an error is then the error
    tunables = plan_tunables(environ, platform.libc_ver()[0])
    return environ if tunables is None else {**environ, "GLIBC_TUNABLES": tunables}
