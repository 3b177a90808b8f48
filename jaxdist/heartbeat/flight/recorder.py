"""The recorder of an agent, which reports slow processes and records each failure.

RUN/flight_3.json      each process's last phases before generation 3 failed or was stuck
RUN/flight_3.png       a picture of this record, drawn after the next generation takes steps
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from jaxdist.heartbeat.flight import picture
from jaxdist.heartbeat.flight.slow import Flight, Slow, find_slow
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Status, read_flight
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject

LOOK_SECONDS = 5.0
"""The time between two checks for slow processes, in seconds. A process that is slow in two
consecutive checks is reported.
"""
DRAW_SECONDS = 60.0
"""The longest time, in seconds, for which the agent waits for a picture before the agent exits."""


class Recorder:
    """The observer that reports slow and stuck processes of an agent's generations.

    The observer also writes records of these processes, and pictures of the records.

    Args:
      say: the function that prints a line for the user.
      draw: whether to draw pictures of the records.
    """

    def __init__(self, journal: Journal, say: Callable[[str], None], *, draw: bool = True) -> None:
        self._journal, self._say, self._draw = journal, say, draw
        self._next = 0.0
        self._generation = 0
        self._beats: dict[int, tuple[int, int]] = {}
        self._suspects: frozenset[int] = frozenset()
        self._told: set[int] = set()
        self._unwritten: list[JsonObject] = []
        self._kept: list[Path] = []
        self._run_folder: RunFolder | None = None
        self._drawing: subprocess.Popen[bytes] | None = None

    def look(self, run_folder: RunFolder, statuses: Sequence[Status]) -> None:
        """Report each process that was slow in two successive checks.

        A process is reported once in a generation. Checks are at least `LOOK_SECONDS` apart, and
        calls in between do nothing.
        """
        now = time.monotonic()
        if run_folder.generation != self._generation:
            self._generation, self._next = run_folder.generation, now + LOOK_SECONDS
            self._beats, self._suspects, self._told = {}, frozenset(), set()
        if now < self._next or len(statuses) < 2:
            return
        self._next = now + LOOK_SECONDS
        slow = find_slow([self._flight(run_folder, one.process) for one in statuses])
        for one in slow:
            if one.process in self._suspects and one.process not in self._told:
                self._told.add(one.process)
                self._tell(run_folder, one)
        self._suspects = frozenset(one.process for one in slow)

    def _flight(self, run_folder: RunFolder, process: int) -> Flight:
        found = read_flight(run_folder.status(process))
        if found is None:
            return Flight(process, [])
        status, phases = found
        beats, late = self._beats.get(process, (0, 0))
        self._beats[process] = status.beats, status.late
        return Flight(process, phases, status.beats - beats, status.late - late)

    def _tell(self, run_folder: RunFolder, slow: Slow) -> None:
        self._journal.add(run_folder, "slow", **asdict(slow))
        self._say(f"{slow.words()} (step {slow.step})")

    def lost(self, run_folder: RunFolder, process: int, how: str, processes: range) -> None:
        """Record the last phases of this machine's processes, after a generation has failed.

        Args:
          run_folder: the folder of the generation.
          process: the process that failed or was stuck.
          how: the kind of failure, as a phrase that follows the name of the process in a sentence.
          processes: the processes of this machine.
        """
        self._run_folder = run_folder
        self._unwritten.append(flight_record(run_folder, process, how, processes))
        self._write()

    def _write(self) -> None:
        """Write the records that are not written yet, if the run directory is known."""
        # If no process has published the directory, or if the disk is full, the next call tries
        # again.
        with suppress(OSError):
            folder = None if self._run_folder is None else self._run_folder.run_directory()
            while folder is not None and self._unwritten:
                record = self._unwritten[0]
                path = folder / record_name(record)
                path.write_text(json.dumps(record, indent=1), encoding="utf-8")
                self._kept.append(path)
                # The record is removed after the write, so that a failed write is repeated.
                self._unwritten.pop(0)

    def begun(self) -> None:
        """Start to draw the latest failures, now that the next generation takes steps."""
        self._write()
        self._begin_drawing()

    def close(self) -> None:
        """Draw the last pictures, and wait until they are finished.

        A process that draws for longer than `DRAW_SECONDS` is killed.
        """
        self._write()
        self._end_drawing()
        self._begin_drawing()
        self._end_drawing()

    def _begin_drawing(self) -> None:
        """Start another process that draws, since a thread would delay the agent's checks."""
        busy = self._drawing is not None and self._drawing.poll() is None
        if busy or not (self._draw and self._kept):
            return
        self._drawing = subprocess.Popen(
            python_module(picture.__name__, *map(str, self._kept)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C goes to the whole process group of the terminal, and must not end the drawing.
            start_new_session=True,
        )
        self._kept = []

    def _end_drawing(self) -> None:
        if self._drawing is None:
            return
        try:
            self._drawing.wait(DRAW_SECONDS)
        except subprocess.TimeoutExpired:  # The record remains, without a picture.
            self._drawing.kill()
            self._drawing.wait()
        self._drawing = None


def record_name(record: JsonObject) -> str:
    """Return the name of the file of a record.

    The name has the number of the record's first process, unless the number is 0. Each machine
    writes a file about its processes, so the names must differ.

    >>> record_name({"generation": 3, "processes": [{"process": 2}]})
    'flight_3_from_2.json'
    """
    first = record["processes"][0]["process"]
    return f"flight_{record['generation']}" + (f"_from_{first}.json" if first else ".json")


def flight_record(run_folder: RunFolder, process: int, how: str, processes: range) -> JsonObject:
    """Return the last phases of the processes of a generation as plain data, with times in seconds.

    In the result, `time` is the current time in seconds since 1970. The `begin` of each phase is
    relative to `time`, and therefore negative; all processes use the same clock.

    Args:
      run_folder: the folder of the generation.
      process: the process that failed or is stuck.
      how: the kind of failure, as a phrase that follows the name of the process in a sentence.
      processes: the processes of this machine.
    """
    now, told = time.monotonic_ns(), []
    for index in processes:
        found = read_flight(run_folder.status(index))
        if found is None:
            told.append({"process": index, "pid": None, "step": None, "phases": []})
            continue
        status, phases = found
        given = [
            {
                "phase": one.name,
                "step": one.step,
                "begin": 1e-9 * (one.begin - now),
                "seconds": 1e-9 * one.duration,
            }
            for one in phases
        ]
        silent = 1e-9 * now - status.alive
        one = {"process": index, "pid": status.pid, "step": status.step, "silent_seconds": silent}
        told.append({**one, "phases": given})
    return {
        "generation": run_folder.generation,
        "process": process,
        "how": how,
        "time": time.time(),
        "processes": told,
    }
