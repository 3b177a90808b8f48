"""Processes that a supervisor starts: JSON lines in on their standard input, out on the output."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Literal, NamedTuple

from jaxdist.runtime.environment import python_module
from jaxdist.runtime.standard_input import lines
from jaxdist.types import JsonObject

END_SECONDS = 10.0
"""For so long a process that was told to end may take."""
LAST_LINES = 15

Role = Literal["server", "aggregator", "worker"]


class Event(NamedTuple):
    """What a process says, or that it has ended.

    Attributes:
      code: of its exit; None while it lives.
    """

    child: Child
    what: JsonObject
    code: int | None = None


class Child:
    """One process.

    Args:
      number: a server's, a rack's, or a client's.
      setup: its first line.
      module: the Python module that it runs, with its role as the argument.
      log: where its standard error goes.
      events: where all that it says goes.
    """

    def __init__(
        self,
        role: Role,
        number: int,
        setup: JsonObject,
        *,
        module: str,
        environ: Mapping[str, str],
        log: Path,
        events: SimpleQueue[Event],
    ) -> None:
        self.role, self.number, self.log, self._events = role, number, log, events
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            # A session of its own: the terminal's signals are the supervisor's to answer.
            self.process = subprocess.Popen(
                python_module(module, role),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**environ},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=str(self), daemon=True)
        self._reader.start()
        self.say(setup)

    def __str__(self) -> str:
        return f"{self.role} {self.number}"

    def say(self, what: JsonObject) -> None:
        """Tell it something; nothing where it is gone."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # its end comes as an event

    def last_words(self) -> str:
        """The end of its standard error."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LAST_LINES:])

    def close_input(self) -> None:
        """Let it end by itself: the end of its input is the order to do so."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for its end, and kill it where it lives at the deadline, of `time.monotonic`."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._events.put(Event(self, json.loads(line)))
        self._events.put(Event(self, {}, self.process.wait()))


def end_together(children: Sequence[Child]) -> None:
    """End processes that may all be stuck, in no more time than one of them may take."""
    for child in children:
        child.close_input()
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.end(deadline)


@dataclass
class Team:
    """Who computes.

    Attributes:
      workers: by client number.
      slots: by client number, which part of each batch is its.
      deaths: by slot, in a row without a clock between.
      done: slots that have taken all their clocks.
    """

    workers: dict[int, Child] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)


class Parent:
    """The other side: what the supervisor says, and how to answer it.

    What the process prints by itself goes to its standard error: the output is for events.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, event: str, **what: object) -> None:
        """Tell the supervisor."""
        with self._lock:
            try:
                self._out.write(json.dumps({"event": event, **what}) + "\n")
                self._out.flush()
            except BrokenPipeError:
                os._exit(1)  # nobody is there to work for

    def hear(self) -> Iterator[JsonObject]:
        """What the supervisor says, to its end."""
        for line in lines():
            yield json.loads(line)
