"""The status of each process of a run, in shared memory that the agent reads without messages.

A thread writes heartbeats independently of the main thread. If a process is stopped (SIGSTOP, a
swapped-out machine), its heartbeats cease. If a process waits in a collective, its heartbeats
continue. Besides the current phase, the memory has a ring buffer with the main thread's last
phases. This flight record outlives the process.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from jaxdist.errors import RunError, os_errors_as
from jaxdist.metrics.account import Activity

BEAT_SECONDS = 0.1
"""The mean time between two heartbeats, in seconds. The times are random, so that a process that is
stopped periodically cannot have all heartbeats between its stops.
"""
LATE_SECONDS = 0.01
"""The delay, in seconds, above which a heartbeat is late, because the process did not run."""
RING = 256
"""The number of phases in the ring buffer, which are the phases of about eighty steps."""
WAIT = "wait"
"""The name of a phase that `Activity` does not have: the main thread waits for the devices to
finish a step."""
PHASES = (*map(str, Activity), WAIT)
SLOW_PHASES = frozenset(
    {Activity.START, Activity.RECOVERY, Activity.COMPILE, Activity.EVALUATION, Activity.IDLE}
)
"""The phases that may take long, and during which other processes do not wait for this process."""
_KINDS = (*Activity, Activity.STEP)
_CODES = {kind: code for code, kind in enumerate(Activity)}
_WAIT = PHASES.index(WAIT)
_FIELDS = struct.Struct("<9q")
"""The layout of the status. The first fields are the process, its pid, the time of the last
heartbeat, and the numbers of heartbeats and of late heartbeats. The other fields are the main
thread's step, phase, start of the phase, and number of phases so far."""
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
      waiting: whether the main thread waits for the devices to finish a step, which other processes
        may delay.
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
    """A phase of the work of a process's main thread.

    Attributes:
      name: the name of the phase, a member of `PHASES`.
      step: the last finished step or, if the phase is a wait, the step for which the thread waited.
      begin: the start of the phase, in nanoseconds of `time.monotonic_ns`. All processes of a
        machine share this clock.
      duration: the length of the phase, in nanoseconds.
    """

    name: str
    step: int
    begin: int
    duration: int

    @property
    def end(self) -> int:
        """The time when the phase ended, in nanoseconds of `time.monotonic_ns`."""
        return self.begin + self.duration


class Publisher(AbstractContextManager):
    """A context manager that writes the status of this process.

    To write a phase takes 1 us of the main thread, and to write a heartbeat takes 20 us of another
    thread (`jaxdist bench elastic`).

    Args:
      path: the path of the file in memory.
      process: the number of this process.

    Raises:
      RunError: there is not enough memory for the file.
    """

    def __init__(self, path: Path, process: int) -> None:
        with os_errors_as(
            RunError, f"{path} in shared memory cannot be written", "free some memory"
        ):
            # The file is filled with zeros. If the file had a hole and memory were full, a later
            # write would kill the process.
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._step, self._code, self._count = -1, _CODES[Activity.START], 0
        self._begun = time.monotonic_ns()
        self._beats = self._late = 0
        self._over = threading.Event()
        self._thread = threading.Thread(
            # The thread has a separate generator of random numbers, since the global generator
            # belongs to the user's code.
            target=self._live,
            args=(random.Random(process),),
            name="status",
            daemon=True,
        )
        struct.pack_into("<2q", self._memory, 0, process, os.getpid())
        self._write(self._begun)
        self._beat()
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the heartbeats and their thread."""
        self._over.set()
        self._thread.join()

    def phase(self, kind: Activity) -> None:
        """Record that the main thread begins another phase."""
        self._turn(_CODES[kind], self._step)

    def wait(self) -> None:
        """Record that the main thread begins to wait for the devices."""
        self._turn(_WAIT, self._step)

    def step(self, step: int) -> None:
        """Record that the metrics of a step have arrived, which ends a wait."""
        if self._code == _WAIT:
            self._turn(_CODES[Activity.STEP], step)
            return
        self._step = step
        self._write(time.monotonic_ns())

    def _turn(self, code: int, step: int) -> None:
        """Write the phase that has ended to the ring buffer, and begin another phase."""
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
            # If the thread slept instead, `close` would have to wait until the next heartbeat.
            if self._over.wait(seconds):
                return
            self._beats += 1
            self._late += time.monotonic() - begun > seconds + LATE_SECONDS
            self._beat()


def read_status(path: Path) -> Status | None:
    """Return the status of a process, or None if the process has not published its status yet."""
    try:
        # Without a buffer, a single system call reads all fields.
        with path.open("rb", buffering=0) as file:
            raw = file.read(_FIELDS.size)
    except FileNotFoundError:
        return None
    return _status(raw)


def read_flight(path: Path) -> tuple[Status, list[Phase]] | None:
    """Return the status of a process and its last phases, oldest first, or None without a status.

    The last phase in the list has not ended; its duration is the time until the last heartbeat.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    status = _status(raw[: _FIELDS.size])
    if status is None or len(raw) != _SIZE:
        return None
    count = _FIELDS.unpack_from(raw)[8]
    # The oldest entry may be inconsistent, because the process may be overwriting it now.
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
    times = since / 1e9, alive / 1e9
    return Status(process, pid, step, _KINDS[code], *times, code == _WAIT, beats, late)
