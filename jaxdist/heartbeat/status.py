"""What each process of a run says of itself, in memory that its agent reads: no message, no wait.

A thread says that the process lives, whatever its main thread does: one that is stopped (SIGSTOP,
a swapped-out machine) falls silent, one that waits in a collective does not. Beside what it is at
now stand the last phases of its main thread, in a ring: a flight record, which outlives it.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.metrics.account import Kind

BEAT_SECONDS = 0.1
"""Between two signs of life, more or less: what stops in turns must not keep time with them."""
LATE_SECONDS = 0.01
"""A sign of life that comes so much later than it was due was kept: the process did not run."""
RING = 256
"""Phases that are kept; some eighty steps."""
WAIT = "wait"
"""A phase besides the kinds of an account: the main thread waits for the devices' step."""
PHASES = (*map(str, Kind), WAIT)
SLOW_PHASES = frozenset({Kind.START, Kind.RECOVERY, Kind.COMPILE, Kind.EVALUATION, Kind.IDLE})
"""That may rightly take long, and in which others do not wait for a process."""
_KINDS = (*Kind, Kind.STEP)
_CODES = {kind: code for code, kind in enumerate(Kind)}
_WAIT = PHASES.index(WAIT)
_FIELDS = struct.Struct("<9q")
"""Process, pid, when alive, beats, late beats; of the main thread step, phase, since, phases."""
_BEATS, _MAIN, _ENTRY = struct.Struct("<3q"), struct.Struct("<4q"), struct.Struct("<4q")
_BEATS_AT, _MAIN_AT = 16, 40
_SIZE = _FIELDS.size + RING * _ENTRY.size


@dataclass(frozen=True)
class Status:
    """Of one process, at one moment.

    Attributes:
      step: the last whose metrics it has seen.
      phase: what its main thread is at.
      since: when step or phase last changed, in seconds of `time.monotonic`.
      alive: when it last said that it lives.
      waiting: whether it waits for the devices' step, which others may keep.
      beats: how often it has said that it lives.
      late: how many of these came late.
    """

    process: int
    pid: int
    step: int
    phase: Kind
    since: float
    alive: float
    waiting: bool = False
    beats: int = 0
    late: int = 0


@dataclass(frozen=True)
class Phase:
    """What a main thread was at for a while.

    Attributes:
      name: one of `PHASES`.
      step: the last that it had seen; of a wait the one that it waited for.
      begin: nanoseconds of `time.monotonic_ns`, which is one clock for all of a machine.
      duration: nanoseconds.
    """

    name: str
    step: int
    begin: int
    duration: int

    @property
    def end(self) -> int:
        """When it was over."""
        return self.begin + self.duration


class Publisher:
    """A process's own side; a context manager.

    Cost: 1 us a phase, 20 us of a thread for each sign of life (`jaxdist bench elastic`).

    Args:
      path: of the file, in memory.

    Raises:
      RunError: there is no room for it.
    """

    def __init__(self, path: Path, process: int) -> None:
        try:
            path.write_bytes(bytes(_SIZE))  # all of it: a write to a hole in full memory is fatal
        except OSError as error:
            raise RunError(
                f"{path} in memory cannot be written: {error.strerror or error}; free some of it"
            ) from error
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._step, self._code, self._count = -1, _CODES[Kind.START], 0
        self._begun = time.monotonic_ns()
        self._beats = self._late = 0
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(random.Random(process),), name="status", daemon=True
        )
        struct.pack_into("<2q", self._memory, 0, process, os.getpid())
        self._write(self._begun)
        self._beat()
        self._thread.start()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """It says nothing any more."""
        self._over.set()
        self._thread.join()

    def phase(self, kind: Kind) -> None:
        """The main thread is at something else now."""
        self._turn(_CODES[kind], self._step)

    def wait(self) -> None:
        """The main thread waits for the devices now, until the metrics of a step have come."""
        self._turn(_WAIT, self._step)

    def step(self, step: int) -> None:
        """The metrics of a step have come."""
        if self._code == _WAIT:
            self._turn(_CODES[Kind.STEP], step)
            return
        self._step = step
        self._write(time.monotonic_ns())

    def _turn(self, code: int, step: int) -> None:
        """What has lasted until now is written down, and another phase begins."""
        now = time.monotonic_ns()
        at = _FIELDS.size + self._count % RING * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, self._begun, now - self._begun, step, self._code)
        self._step, self._code = step, code
        self._count += 1
        self._begun = now
        self._write(now)

    def _write(self, now: int) -> None:
        _MAIN.pack_into(self._memory, _MAIN_AT, self._step, self._code, now, self._count)

    def _beat(self) -> None:
        now = time.monotonic_ns()
        _BEATS.pack_into(self._memory, _BEATS_AT, now, self._beats, self._late)

    def _live(self, rng: random.Random) -> None:
        while True:
            seconds = BEAT_SECONDS * rng.uniform(0.5, 1.5)
            begun = time.monotonic()
            if self._over.wait(seconds):
                return
            self._beats += 1
            self._late += time.monotonic() - begun > seconds + LATE_SECONDS
            self._beat()


def read_status(path: Path) -> Status | None:
    """What a process says; None: it has said nothing yet."""
    try:
        with path.open("rb", buffering=0) as file:
            raw = file.read(_FIELDS.size)
    except FileNotFoundError:
        return None
    return _status(raw)


def read_flight(path: Path) -> tuple[Status, list[Phase]] | None:
    """What a process says, and its last phases in their order, that which lasts still as the last.

    Of one that is dead too, whose last phase lasts until it was last alive.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    status = _status(raw[: _FIELDS.size])
    if status is None or len(raw) != _SIZE:
        return None
    count = _FIELDS.unpack_from(raw)[8]
    # The oldest may be half another's, which is written over it at this moment.
    first = max(count - RING + 1, 0)
    phases = []
    for number in range(first, count):
        at = _FIELDS.size + number % RING * _ENTRY.size
        begin, duration, step, code = _ENTRY.unpack_from(raw, at)
        phases.append(Phase(PHASES[code], step, begin, duration))
    name = WAIT if status.waiting else str(status.phase)
    begin = phases[-1].end if phases else round(1e9 * status.since)
    end = max(round(1e9 * max(status.alive, status.since)), begin)
    return status, [*phases, Phase(name, status.step, begin, end - begin)]


def _status(raw: bytes) -> Status | None:
    if len(raw) != _FIELDS.size:
        return None
    process, pid, alive, beats, late, step, code, since, _ = _FIELDS.unpack(raw)
    if not alive:
        return None
    return Status(
        process,
        pid,
        step,
        _KINDS[code],
        since / 1e9,
        alive / 1e9,
        waiting=code == _WAIT,
        beats=beats,
        late=late,
    )
