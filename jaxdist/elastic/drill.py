"""Fault injection: seeded random steps at which processes of an elastic run are killed or stopped.

From the first failure, a drill predicts the share of the run's time that is used for steps that no
failure undoes. The drill compares this prediction with the measured share.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from jaxdist.heartbeat import intervals
from jaxdist.heartbeat.flight.recorder import Recorder
from jaxdist.heartbeat.journal import Journal
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.saving import RECOVERY
from jaxdist.heartbeat.status import Status
from jaxdist.metrics.account import Activity
from jaxdist.metrics.goodput import INTERVALS, Goodput
from jaxdist.types import Json, JsonObject

STOPS = 0.25
"""The share of failures that stop a process with SIGSTOP instead of killing it."""
FIRST, LAST = 0.1, 0.95
"""The fractions of a run's steps between which all failures occur."""


@dataclass(frozen=True)
class Strike:
    """An injected failure.

    Attributes:
      step: the step after which the failure occurs, once any process has finished the step.
      process: the number of the process that fails.
      stops: whether the process is stopped with SIGSTOP instead of killed.
    """

    step: int
    process: int
    stops: bool

    @property
    def signal(self) -> Signals:
        """The signal that the process gets."""
        return Signals.SIGSTOP if self.stops else Signals.SIGKILL


def strikes_of(failures: int, steps: int, processes: int, seed: int) -> list[Strike]:
    """Return the failures to inject: a failure in each of `failures` equal parts of a run's steps.

    The first failure kills its process; each later failure may stop the process instead.

    >>> [one.step for one in strikes_of(3, 1000, 4, seed=0)]
    [340, 657, 889]
    """
    rng = random.Random(seed)
    part = (LAST - FIRST) / failures
    found = []
    for index in range(failures):
        step = math.ceil(steps * (FIRST + part * (index + rng.random())))
        process, stops = rng.randrange(processes), rng.random() < STOPS
        # The first failure always kills its process, because `judge_drill` uses this failure to
        # measure the recovery from a kill. For a stopped process, `judge_drill` adds the time after
        # which the stop is detected.
        found.append(Strike(step, process, stops and index > 0))
    return found


class Striker(Recorder):
    """A recorder that also injects failures.

    Attributes:
      left: the failures that have not occurred yet.
      struck: the times of the failures that occurred, in seconds since 1970.
      run: the run directory, or None until it is known.
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
        """Record that a generation takes steps, after which the next failure may occur."""
        super().begun()
        # Failures wait for the end of a recovery, because `planned_share` assumes this.
        self._ready = True

    def lost(self, run_folder: RunFolder, process: int, how: str, processes: range) -> None:
        """Record the failure of a process, and allow no other failure until there are new steps."""
        super().lost(run_folder, process, how, processes)
        self._ready = False

    def look(self, run_folder: RunFolder, statuses: Sequence[Status]) -> None:
        """Record the statuses of the processes, and inject the next failure at its step."""
        super().look(run_folder, statuses)
        if not (self._ready and self.left):
            return
        if self.run is None:
            # While no process has published the directory, the next look tries again.
            with suppress(OSError):
                self.run = run_folder.run_directory()
        strike = self.left[0]
        of = {one.process: one for one in statuses}
        if strike.process in of and max(one.step for one in statuses) >= strike.step:
            self._ready = False
            self.left.pop(0)
            self.struck.append(time.time())
            # The process may have ended by itself since it published its status, and needs no
            # signal then.
            with suppress(ProcessLookupError):
                os.kill(of[strike.process].pid, strike.signal)


@dataclass(frozen=True)
class Recovery:
    """The recovery from an injected failure.

    Attributes:
      seconds: the time from the failure to the first new step, in seconds.
      parts: the parts of `seconds` by name, of which the first ends when the agent detects the
        failure. The part for the first step includes the repeated steps.
      lost_steps: the number of steps that were repeated.
    """

    strike: Strike
    seconds: float
    parts: Mapping[str, float]
    lost_steps: int


def recoveries_of(
    strikes: Sequence[Strike],
    struck: Sequence[float],
    events: Sequence[JsonObject],
    found: Goodput,
) -> list[Recovery]:
    """Return the recovery from each failure that occurred, in order.

    Args:
      strikes: the failures that were planned, in order.
      struck: the times of the failures that occurred, in seconds since 1970.
      events: the events of the run's journal.
      found: the use of time in each attempt of the run.
    """
    recoveries = []
    # The pairs are not `strict`, since the run may end before all failures have occurred.
    for strike, at in zip(strikes, struck, strict=False):
        later = [event for event in events if event["event"] == "begun" and event["time"] > at]
        if not later:
            continue
        begun = later[0]
        seconds = float(begun["time"]) - at
        parts = {part: float(begun[f"{part}_seconds"]) for part in RECOVERY}
        parts = {"detect": max(seconds - sum(parts.values()), 0.0), **parts}
        lost = next(event for event in events if event["event"] == "lost" and event["time"] > at)
        life = next((one for one in found.lives if one.began + one.wall_seconds > begun["time"]),
                    found.lives[-1])  # fmt: skip
        again = max(int(lost["step"]) - life.first_step, 0)
        recoveries.append(Recovery(strike, seconds, parts, again))
    return recoveries


@dataclass(frozen=True)
class Drilled:
    """The result of a drill.

    Attributes:
      predicted: the predicted share of kept work in the time after the first start.
      achieved: the measured share of kept work in the same time.
    """

    recoveries: Sequence[Recovery]
    predicted: float
    achieved: float

    @property
    def held(self) -> bool:
        """Whether `achieved` is at least nine tenths of `predicted`."""
        return self.achieved >= 0.9 * self.predicted

    def as_json(self) -> JsonObject:
        """Return the result of the drill as an object for JSON."""
        told: list[Json] = [
            {
                "step": one.strike.step,
                "process": one.strike.process,
                "signal": one.strike.signal.name,
                "seconds": one.seconds,
                **{f"{part}_seconds": seconds for part, seconds in one.parts.items()},
                "lost_steps": one.lost_steps,
            }
            for one in self.recoveries
        ]
        return {"predicted": self.predicted, "achieved": self.achieved, "recoveries": told}

    def lines(self) -> list[str]:
        """Return the result as text: a line for each recovery, and a line with the shares."""
        rows = [
            f"step {one.strike.step:>7} process {one.strike.process} {one.strike.signal.name}  "
            f"{one.seconds:6.2f} s = "
            + " + ".join(f"{part.replace('_', ' ')} {took:.2f}" for part, took in one.parts.items())
            + f"; {one.lost_steps} steps repeated"
            for one in self.recoveries
        ]
        verdict = (
            f"drill  {self.achieved:.1%} of the time was used for new steps; the prediction was "
            f"{self.predicted:.1%}"
        )
        return [*rows, verdict]


def judge_drill(
    recoveries: Sequence[Recovery],
    found: Goodput,
    every: int,
    silent_seconds: float,
) -> Drilled:
    """Return the predicted share of kept work, with the measured share.

    The prediction uses the number and the kinds of all failures. Its times are measured only in the
    run's first attempt and in the recovery from the first failure.

    Args:
      recoveries: the recoveries of the run, of which there is at least one.
      found: the use of time in each attempt of the run.
      every: the number of steps between two saves.
      silent_seconds: the time, in seconds, after which a stopped process is detected.
    """
    first, total = found.lives[0], found.lives[-1].last_step
    useful = sum(first.seconds[kind] for kind in (Activity.STEP, Activity.INPUT_WAIT))
    lost_work = first.seconds[Activity.LOST_WORK]
    taken = max(first.last_step - first.first_step, 1)
    kept = max(first.kept_step - first.first_step, 0)
    step_seconds = useful / kept if kept else lost_work / taken
    saves = sum(first.seconds[kind] for kind in (Activity.CHECKPOINT_BLOCKED, Activity.SNAPSHOT))
    cost = saves / max(kept, 1) * every
    again = recoveries[0]
    recovery = again.seconds - again.lost_steps * step_seconds
    recovery += silent_seconds * sum(one.strike.stops for one in recoveries) / len(recoveries)
    between = total * step_seconds / len(recoveries)
    predicted = intervals.planned_share(every * step_seconds, cost, between, max(recovery, 0.0))
    return Drilled(recoveries, predicted, found.kept)


def every_of(records: Sequence[JsonObject], memory: Json, disk: Json) -> int:
    """Return the number of steps between the saves from which a run recovers after a failure.

    Args:
      records: the run's metrics, which contain the interval that the run chose.
      memory, disk: the config's intervals of snapshots and of checkpoints. Each interval is a
        number of steps or "auto"; `memory` is None if the run takes no snapshots.
    """
    kind, wanted = (
        (Activity.CHECKPOINT_BLOCKED, disk) if memory is None else (Activity.SNAPSHOT, memory)
    )
    if isinstance(wanted, int):
        return wanted
    name = f"{kind}_steps"
    chosen = [one[name] for one in records if one["split"] == INTERVALS and name in one]
    return int(chosen[-1]) if chosen else 1
