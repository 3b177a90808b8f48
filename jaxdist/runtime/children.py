"""The child processes of this process, which exchange lines of JSON with this process."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import Signals
from typing import IO, Any, NamedTuple, Protocol

from jaxdist.types import Json, JsonObject

END_SECONDS = 10.0
"""The seconds within which a child must exit after its input has ended."""
LAST_LINES = 15


class Event(NamedTuple):
    """A message from a child, or the end of a child.

    Attributes:
      child: the `Child` that sent the message, or ended.
      what: the message, or an empty dict at the end.
      code: the exit code of the child, or None for a message.
    """

    child: Any
    what: JsonObject
    code: int | None = None


class PipedProcess(Protocol):
    """The methods of `subprocess.Popen` that a child's process must have."""

    pid: int

    def wait(self, timeout: float | None = None, /) -> int: ...

    def kill(self) -> None: ...


class Child:
    """A child process whose standard input is a socket with JSON lines in both directions.

    Args:
      name: the name of the child in error messages.
      begin: a function that starts the process, given the descriptors of its standard input and of
        its standard error.
      log: the file to which the child's standard error is appended.
      events: the queue to which a thread adds the child's messages and its end.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[int, int], PipedProcess],
        *,
        log: Path,
        events: SimpleQueue[Event],
    ) -> None:
        self.name, self.log, self._events = name, log, events
        log.parent.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair()
        try:
            # If `theirs` stayed open in this process, `_read` would not see the end of a dead
            # child.
            with log.open("ab") as errors, theirs:
                self.process = begin(theirs.fileno(), errors.fileno())
        except BaseException:  # The reader, which closes the socket at its end, has not started.
            self._socket.close()
            raise
        # Each child has a thread that fills the common queue, so that the parent can wait for all
        # children at once.
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def __str__(self) -> str:
        return self.name

    def say(self, what: Json) -> None:
        """Send a message to the child, or do nothing if the child has ended (see `events`)."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def last_words(self) -> str:
        """Return the last lines of the child's standard error."""
        return last_lines(self.log)

    def close_input(self) -> None:
        """Close the child's input, which tells the child to exit."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self, deadline: float) -> None:
        """Wait until the child has ended, or kill it at `deadline`, a time of `time.monotonic`."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """Kill the child, and return when the child is gone."""
        self.process.kill()
        self.process.wait()
        self.close_input()

    def _read(self) -> None:
        with self._socket, self._socket.makefile("rb") as lines, suppress(ConnectionResetError):
            for line in lines:
                self._events.put(Event(self, json.loads(line)))
        self._events.put(Event(self, {}, self.process.wait()))


def end_together(children: Sequence[Child]) -> None:
    """End all children; kill children that are still alive after `END_SECONDS`."""
    for child in children:
        child.close_input()
    # The deadline is common, since separate waits for N children could take N times as long.
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.end(deadline)


class Parent:
    """The connection of a child to its parent.

    All other output of the child is sent to its standard error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Standard input is a socket, so the same descriptor can be written.
        self._out: IO[str] = os.fdopen(os.dup(0), "w", encoding="utf-8")
        # Standard output becomes standard error: libraries must not print into the parent's output.
        os.dup2(2, 1)

    def say(self, event: str, **what: object) -> None:
        """Send a message to the parent; end this process if the parent is gone."""
        with self._lock:
            try:
                self._out.write(json.dumps({"event": event, **what}) + "\n")
                self._out.flush()
            except ConnectionError:
                os._exit(1)  # If the parent has ended, the work of this process is useless.

    def hear(self) -> Iterator[JsonObject]:
        """Yield the parent's messages, until the parent closes the input or ends."""
        for line in input_lines():
            yield json.loads(line)


def input_lines() -> Iterator[bytes]:
    """Yield the lines of standard input as they arrive; each byte costs a call of `read`.

    A thread that waits for a line of `sys.stdin` holds a lock, and Python aborts a process that
    ends meanwhile. This reader has no lock.
    """
    # The process at the other end has died before it has read all lines.
    with suppress(ConnectionResetError):
        yield from io.FileIO(0, closefd=False)


def wait_for_input_end() -> None:
    """Wait until the process at the other end of standard input has closed the stream or died."""
    with io.FileIO(0, closefd=False) as file:
        while file.read(4096):
            pass


def send(stream: IO[bytes], what: Json) -> None:
    """Write a JSON line to a stream; do nothing if the stream or its other end is closed."""
    with suppress(ConnectionError, ValueError):
        stream.write(json.dumps(what).encode() + b"\n")
        stream.flush()


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """Return the last lines of a log, or an empty string if the log cannot be read."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-count:])


def how_ended(code: int) -> str:
    """Describe an exit code for the user.

    >>> how_ended(-9), how_ended(3)
    ('signal SIGKILL', 'exit code 3')
    """
    return f"signal {Signals(-code).name}" if code < 0 else f"exit code {code}"
