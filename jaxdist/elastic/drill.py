"""Failures on purpose: processes of an elastic run are killed and stopped at seeded steps.

What the run should keep is predicted of what the first failure took, and held against what it did.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxdist.heartbeat import intervals
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.saving import RECOVERY
from jaxdist.heartbeat.status import Status
from jaxdist.metrics.account import Kind
from jaxdist.metrics.goodput import INTERVALS, Goodput
from jaxdist.types import Json, JsonObject

STOPS = 0.25
"""The share of failures that stop a process in place of killing it."""
FIRST, LAST = 0.1, 0.95
"""Of a run's steps: failures come between these."""


@dataclass(frozen=True)
class Strike:
    """A failure on purpose.

    Attributes:
      step: it comes at the first moment when a process has taken so many.
      stops: whether the process is stopped, and not killed.
    """

    step: int
    process: int
    stops: bool


def strikes_of(failures: int, steps: int, processes: int, seed: int) -> list[Strike]:
    """Where failures come: one in each of as many equal parts of the run; the first kills.

    >>> [one.step for one in strikes_of(3, 1000, 4, seed=0)]
    [340, 657, 889]
    """
    rng = random.Random(seed)
    part = (LAST - FIRST) / failures
    found = []
    for index in range(failures):
        step = math.ceil(steps * (FIRST + part * (index + rng.random())))
        process, stops = rng.randrange(processes), rng.random() < STOPS
        found.append(Strike(step, process, stops and index > 0))
    return found


class Striker(Recorder):
    """Hears of a run's generations as a `Recorder` does, and strikes.

    Attributes:
      left: strikes that are still to come.
      struck: when those that came did, in seconds since 1970.
      run: the run directory, once it is known.
    """

    def __init__(
        self, journal: Journal, say: Callable[[str], None], strikes: Sequence[Strike]
    ) -> None:
        super().__init__(journal, say)
        self.left = list(strikes)
        self.struck: list[float] = []
        self.run: Path | None = None
        self._ready = False

    def begun(self) -> None:
        """See `Recorder`."""
        super().begun()
        self._ready = True

    def lost(self, run_folder: RunFolder, process: int, how: str, processes: range) -> None:
        """See `Recorder`."""
        super().lost(run_folder, process, how, processes)
        self._ready = False

    def look(self, run_folder: RunFolder, statuses: Sequence[Status]) -> None:
        """See `Recorder`."""
        super().look(run_folder, statuses)
        if not (self._ready and self.left):
            return
        if self.run is None:
            with suppress(OSError):
                self.run = run_folder.run_directory()
        strike = self.left[0]
        of = {one.process: one for one in statuses}
        if strike.process in of and max(one.step for one in statuses) >= strike.step:
            self._ready = False
            self.left.pop(0)
            self.struck.append(time.time())
            with suppress(ProcessLookupError):
                number = signal.SIGSTOP if strike.stops else signal.SIGKILL
                os.kill(of[strike.process].pid, number)


@dataclass(frozen=True)
class Recovery:
    """What followed a strike.

    Attributes:
      seconds: from it to the first step that none before had come to.
      detect: seconds of these until the agent knew.
      parts: the others by name; the first step's include steps that were taken again.
      lost_steps: that were taken again.
    """

    strike: Strike
    seconds: float
    detect: float
    parts: Mapping[str, float]
    lost_steps: int


def recoveries_of(
    strikes: Sequence[Strike],
    struck: Sequence[float],
    events: Sequence[JsonObject],
    found: Goodput,
) -> list[Recovery]:
    """The recoveries of a run, from its journal and its lives.

    Args:
      struck: when the first of the strikes came, in seconds since 1970.
    """
    recoveries = []
    for strike, at in zip(strikes, struck, strict=False):
        later = [event for event in events if event["event"] == "begun" and event["time"] > at]
        if not later:
            continue
        begun = later[0]
        parts = {part: float(begun[f"{part}_seconds"]) for part in RECOVERY}
        seconds = float(begun["time"]) - at
        lost = next(event for event in events if event["event"] == "lost" and event["time"] > at)
        life = next((one for one in found.lives if one.began + one.wall_seconds > begun["time"]),
                    found.lives[-1])  # fmt: skip
        again = max(int(lost["step"]) - life.first_step, 0)
        detect = max(seconds - sum(parts.values()), 0.0)
        recoveries.append(Recovery(strike, seconds, detect, parts, again))
    return recoveries


@dataclass(frozen=True)
class Drilled:
    """How a run stood what it was made to.

    Attributes:
      predicted: the share of the time that it should have kept.
      achieved: that it did; both of the time after the first start.
    """

    recoveries: Sequence[Recovery]
    predicted: float
    achieved: float

    @property
    def held(self) -> bool:
        """Whether it kept nine tenths of what it should have."""
        return self.achieved >= 0.9 * self.predicted

    def as_json(self) -> JsonObject:
        """Plain data."""
        told: list[Json] = [
            {
                "step": one.strike.step,
                "process": one.strike.process,
                "signal": "SIGSTOP" if one.strike.stops else "SIGKILL",
                "seconds": one.seconds,
                "detect_seconds": one.detect,
                **{f"{part}_seconds": seconds for part, seconds in one.parts.items()},
                "lost_steps": one.lost_steps,
            }
            for one in self.recoveries
        ]
        return {"predicted": self.predicted, "achieved": self.achieved, "recoveries": told}

    def lines(self) -> list[str]:
        """For a person."""
        rows = [
            f"step {one.strike.step:>7} process {one.strike.process} "
            f"{'SIGSTOP' if one.strike.stops else 'SIGKILL'}  {one.seconds:6.2f} s = detect "
            f"{one.detect:.2f}"
            + "".join(f" + {part.replace('_', ' ')} {took:.2f}" for part, took in one.parts.items())
            + f"; {one.lost_steps} steps again"
            for one in self.recoveries
        ]
        verdict = f"drill  kept {self.achieved:.1%} of the time, predicted {self.predicted:.1%}"
        return [*rows, verdict]


def judge(
    recoveries: Sequence[Recovery],
    found: Goodput,
    every: int,
    silent_seconds: float,
) -> Drilled:
    """What a run should have kept, by its first life and its first failure, beside what it did.

    Args:
      recoveries: one at least.
      every: steps between two saves.
      silent_seconds: until a process that is stopped is known to be.
    """
    first, total = found.lives[0], found.lives[-1].last_step
    useful = sum(first.seconds[kind] for kind in (Kind.STEP, Kind.INPUT_WAIT))
    lost_work = first.seconds[Kind.LOST_WORK]
    taken = max(first.last_step - first.first_step, 1)
    kept = max(first.kept_step - first.first_step, 0)
    step_seconds = useful / kept if kept else lost_work / taken
    saves = sum(first.seconds[kind] for kind in (Kind.CHECKPOINT_BLOCKED, Kind.SNAPSHOT))
    cost = saves / max(kept, 1) * every
    again = recoveries[0]
    recovery = again.seconds - again.lost_steps * step_seconds
    recovery += silent_seconds * sum(one.strike.stops for one in recoveries) / len(recoveries)
    between = total * step_seconds / len(recoveries)
    predicted = intervals.planned(every * step_seconds, cost, between, max(recovery, 0.0))
    return Drilled(recoveries, predicted, found.kept)


def every_of(records: Sequence[JsonObject], memory: Json, disk: Json) -> int:
    """Steps between two saves that a failure of a process goes back to.

    Args:
      records: of metrics, where a run has written down what it chose.
      memory, disk: of the config: steps, "auto", or for memory None.
    """
    kind, wanted = (Kind.CHECKPOINT_BLOCKED, disk) if memory is None else (Kind.SNAPSHOT, memory)
    if isinstance(wanted, int):
        return wanted
    name = f"{kind}_steps"
    chosen = [one[name] for one in records if one["split"] == INTERVALS and name in one]
    return int(chosen[-1]) if chosen else 1
