"""The status of each process of a run, in shared memory that the agent reads without messages.

A thread sends heartbeats independently of the main thread. A process that is stopped (SIGSTOP, a
swapped-out machine) falls silent; a process that waits in a collective does not. Besides the
current phase, the memory holds a ring buffer of the main thread's last phases: a flight record,
which outlives the process.
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
from jaxdist.metrics.account import Activity

BEAT_SECONDS = 0.1
"""The mean seconds between two heartbeats. The seconds are random, so that a process that is
stopped periodically cannot stay in phase with its heartbeats."""
LATE_SECONDS = 0.01
"""The delay above which a heartbeat counts as late, because the process did not run."""
RING = 256
"""The number of phases in the ring buffer, which is about eighty steps."""
WAIT = "wait"
"""The name of a phase besides those of `Activity`: the main thread waits for the devices' step."""
PHASES = (*map(str, Activity), WAIT)
SLOW_PHASES = frozenset(
    {Activity.START, Activity.RECOVERY, Activity.COMPILE, Activity.EVALUATION, Activity.IDLE}
)
"""Phases that may take long, and during which other processes do not wait for this one."""
_KINDS = (*Activity, Activity.STEP)
_CODES = {kind: code for code, kind in enumerate(Activity)}
_WAIT = PHASES.index(WAIT)
_FIELDS = struct.Struct("<9q")
"""The layout of the status: the process, its pid, the time of the last heartbeat, the numbers of
heartbeats and of late heartbeats; then the main thread's step, phase, start of the phase, and
number of phases so far."""
_BEATS, _MAIN, _ENTRY = struct.Struct("<3q"), struct.Struct("<4q"), struct.Struct("<4q")
_BEATS_AT, _MAIN_AT = 16, 40
_SIZE = _FIELDS.size + RING * _ENTRY.size


@dataclass(frozen=True)
class Status:
    """The status of one process at one moment.

    Attributes:
      step: the last step whose metrics the process has received.
      phase: the current phase of the process's main thread.
      since: the time when the step or the phase last changed, in seconds of `time.monotonic`.
      alive: the time of the last heartbeat, in seconds of `time.monotonic`.
      waiting: whether the main thread waits for the devices' step, which other processes may delay.
      beats: the number of heartbeats so far.
      late: the number of late heartbeats so far.
    """

    process: int
    pid: int
    step: int
    phase: Activity
    since: float
    alive: float
    waiting: bool = False
    beats: int = 0
    late: int = 0


@dataclass(frozen=True)
class Phase:
    """A phase of a main thread.

    Attributes:
      name: one of `PHASES`.
      step: the last finished step; for a wait, the step for which the thread waited.
      begin: the start of the phase in nanoseconds of `time.monotonic_ns`, a clock that all
        processes of a machine share.
      duration: the length of the phase in nanoseconds.
    """

    name: str
    step: int
    begin: int
    duration: int

    @property
    def end(self) -> int:
        """The time when the phase ended."""
        return self.begin + self.duration


class Publisher:
    """The writer of a process's status, within the process; a context manager.

    A phase costs 1 us, and a heartbeat costs 20 us of a thread (`jaxdist bench elastic`).

    Args:
      path: the file in memory.
      process: the number of the process.

    Raises:
      RunError: there is no room for the file.
    """

    def __init__(self, path: Path, process: int) -> None:
        try:
            # The file is filled with zeros, because a later write to a hole in the file would kill
            # the process if memory were full.
            path.write_bytes(bytes(_SIZE))
        except OSError as error:
            raise RunError(
                f"{path} in memory cannot be written: {error.strerror or error}; free some memory"
            ) from error
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._step, self._code, self._count = -1, _CODES[Activity.START], 0
        self._begun = time.monotonic_ns()
        self._beats = self._late = 0
        self._over = threading.Event()
        self._thread = threading.Thread(
            # The thread has its own generator, since the global one belongs to the user's code.
            target=self._live,
            args=(random.Random(process),),
            name="status",
            daemon=True,
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
        """Stop the heartbeats and their thread."""
        self._over.set()
        self._thread.join()

    def phase(self, kind: Activity) -> None:
        """Record that the main thread enters another phase."""
        self._turn(_CODES[kind], self._step)

    def wait(self) -> None:
        """Record that the main thread waits for the devices, until the metrics of a step arrive."""
        self._turn(_WAIT, self._step)

    def step(self, step: int) -> None:
        """Record that the metrics of a step have arrived."""
        if self._code == _WAIT:
            self._turn(_CODES[Activity.STEP], step)
            return
        self._step = step
        self._write(time.monotonic_ns())

    def _turn(self, code: int, step: int) -> None:
        """Write the phase that has just ended to the ring buffer, and start another phase."""
        now = time.monotonic_ns()
        at = _FIELDS.size + self._count % RING * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, self._begun, now - self._begun, step, self._code)
        self._step, self._code = step, code
        self._count += 1
        self._begun = now
        # The count is written after the entry, since a reader trusts all entries below the count.
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
            # With `sleep`, `close` would have to wait for the next heartbeat.
            if self._over.wait(seconds):
                return
            self._beats += 1
            self._late += time.monotonic() - begun > seconds + LATE_SECONDS
            self._beat()


def read_status(path: Path) -> Status | None:
    """Return the status of a process, or None if the process has not published a status yet."""
    try:
        # Without a buffer, a single system call reads all fields.
        with path.open("rb", buffering=0) as file:
            raw = file.read(_FIELDS.size)
    except FileNotFoundError:
        return None
    return _status(raw)


def read_flight(path: Path) -> tuple[Status, list[Phase]] | None:
    """Return the status of a process and its last phases in order.

    The last phase in the list has not ended; it is listed up to the process's last heartbeat.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    status = _status(raw[: _FIELDS.size])
    if status is None or len(raw) != _SIZE:
        return None
    count = _FIELDS.unpack_from(raw)[8]
    # The oldest entry may be incomplete, because the process may be overwriting it now.
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
