"""Calls of a function that may crash its process; the calls therefore run in child processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jaxdist.runtime.children import how_ended

LIMIT_SECONDS = 600.0
"""The CPU time after which a child without an answer is killed, in seconds. An idle child is killed
after the same elapsed time."""
BUSY_SHARE = 0.01
"""The fraction of a CPU below which a child counts as idle. A working child gets more than this
fraction, even on a busy machine."""
LOOK_SECONDS = 0.5
"""The time between two readings of a child's CPU time, in seconds."""
# Children are spawned: a fork would copy the locks of jax's device threads without the threads.
_CONTEXT = multiprocessing.get_context("spawn")
_FATAL = re.compile(r"^F\d+ .*?\] (.*)|^.*?(\w+\.cc:\d+\] Check failed.*)", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """The result of a call whose child process gave no answer.

    Attributes:
      reason: the reason why there is no answer, with the last line of the child's standard error.
    """

    reason: str


def answers(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    jobs: int,
    limit_seconds: float | None = LIMIT_SECONDS,
) -> Generator[Any, None, None]:
    """Yield the function's value for each item, in the order of the items.

    If the process of a call crashes or exceeds the limit, the call's value is `Ended`.

    Args:
      function: a function that can be imported by its name, or a partial of such a function.
      items: the arguments, one for each call.
      jobs: the number of processes.
      limit_seconds: the limit on a call's CPU time, or None for no limit. CPU time depends little
        on the machine's load.
    """
    idle: SimpleQueue[_Child] = SimpleQueue()
    children = [_Child(function, limit_seconds) for _ in range(jobs)]
    for child in children:
        idle.put(child)

    def answer(item: Any) -> Any:
        child = idle.get()
        try:
            return child.ask(item)
        finally:
            idle.put(child)

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = [pool.submit(answer, item) for item in items]
        yield from (future.result() for future in waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.end()


class _Child:
    """A child process that is started on demand, and again after a crash.

    The child writes its standard error to a file, from which the reason for a crash is read.
    """

    def __init__(self, function: Callable[[Any], Any], limit_seconds: float | None):
        self._function, self._limit_seconds = function, limit_seconds
        self._process: Any = None
        self._pipe: Connection | None = None
        self._said = Path()
        # The lock is needed because `answers` may call `end` in its own thread while a thread of
        # the pool is in `_begun`.
        self._changing = threading.Lock()

    def ask(self, item: Any) -> Any:
        """Return the function's value for an item, or `Ended` if the process gives no answer."""
        pipe = self._begun()
        try:
            pipe.send(item)
            how = self._waited(pipe)
            if how is None:
                return pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            how = f"the process ended ({how_ended(self._process.exitcode)})"
        said = _last_words(self._said)
        self.end()
        return Ended(f"{how}: {said}" if said else how)

    def _waited(self, pipe: Connection) -> str | None:
        """Wait until the child has answered, and return None.

        If the child exceeds the limit on CPU time first, or is idle for too long, the result is the
        reason as text.
        """
        limit = self._limit_seconds
        if limit is None:
            pipe.poll(None)
            return None
        begun = seen = _cpu_seconds(self._process.pid)
        looked = time.monotonic()
        while not pipe.poll(LOOK_SECONDS):
            spent, now = _cpu_seconds(self._process.pid), time.monotonic()
            if spent - begun > limit:
                return f"the process gave no answer in {limit:g} s of CPU time"
            if now - looked > limit:
                if spent - seen < BUSY_SHARE * limit:
                    return f"the process gave no answer and was idle for {limit:g} s"
                looked, seen = now, spent
        return None

    def end(self) -> None:
        """Kill the child process, if there is one."""
        with self._changing:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._said.unlink(missing_ok=True)

    def _begun(self) -> Connection:
        if self._process is None or self._pipe is None:
            self._pipe, theirs = _CONTEXT.Pipe()
            handle, name = tempfile.mkstemp(prefix="jaxdist-", suffix=".log")
            os.close(handle)
            self._said = Path(name)
            with self._changing:
                self._process = _CONTEXT.Process(
                    target=_serve, args=(self._function, theirs, name), daemon=True
                )
                self._process.start()
            # If this process kept the child's end of the pipe open, `recv` would raise no EOFError
            # when the child ends.
            theirs.close()
        return self._pipe


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds.

    On systems other than Linux the result is the monotonic time. The time is 0 for a process that
    has ended.
    """
    if not sys.platform.startswith("linux"):
        return time.monotonic()
    try:
        # The argument is the clock of the process, in the encoding of glibc's clock_getcpuclockid.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # The process has ended, and the reader of the pipe reports that.
        return 0.0


def _serve(function: Callable[[Any], Any], pipe: Connection, said: str) -> None:
    """Answer each item from a pipe with the function's value, until the pipe is closed.

    Args:
      function: the function to call for each item.
      pipe: the child's end of the pipe.
      said: the path of the file for standard error.
    """
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    # Ctrl-C reaches the whole process group. The child ignores it, because the parent kills its
    # children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Traces live long: at Python's own thresholds, collections take a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(function(item))


def _last_words(said: Path) -> str:
    """Return the last line with a failed check of C++ in a file of standard error.

    Without such a line the result is the last line of the file, or an empty string.

    Args:
      said: the file of standard error.
    """
    text = said.read_text(encoding="utf-8", errors="replace")
    fatal = [match.group() for match in _FATAL.finditer(text)]
    return (fatal or text.strip().splitlines() or [""])[-1].strip()
