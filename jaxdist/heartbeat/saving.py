"""How often a run is to save, by what it has measured of itself: functions of plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.heartbeat import intervals
from jaxdist.types import JsonObject

RECOVERY = ("stop", "restart", "restore", "first_step")
"""Parts of what an agent writes down when a generation takes steps, each in seconds."""
MOST_STEPS = 2**30


@dataclass(frozen=True)
class Failures:
    """How often a run fails, and what one costs.

    Attributes:
      mttf: mean seconds between two.
      recovery: seconds from one until work goes on.
      seen: how many there were; of 0 both are what was taken for granted.
    """

    mttf: float
    recovery: float
    seen: int = 0


def failures_of(events: Sequence[JsonObject], now: float, prior: Failures) -> Failures:
    """What an agent's journal tells: its time over its losses. Before the first the prior holds.

    Args:
      now: seconds since 1970.
      prior: before any failure; its recovery as well until one has been seen.
    """
    begun = [event for event in events if event["event"] == "begun"]
    lost = sum(event["event"] == "lost" for event in events)
    if not begun or not lost:
        return prior
    took = [sum(float(event[f"{part}_seconds"]) for part in RECOVERY) for event in begun]
    mttf = max((now - float(begun[0]["time"]) + took[0]) / lost, 1.0)
    later = [seconds for event, seconds in zip(begun, took, strict=True) if event["generation"] > 1]
    return Failures(mttf, statistics.median(later) if later else prior.recovery, lost)


@dataclass(frozen=True)
class Interval:
    """How often to save.

    Attributes:
      steps: between two saves.
      work: seconds that they take.
      cost: seconds that training stands still for a save.
      predicted: the share of time that is work which is kept, where failures come at random.
    """

    steps: int
    work: float
    cost: float
    failures: Failures
    predicted: float

    def words(self, what: str) -> str:
        """One line for a person.

        >>> print(choose(0.5, 0.1, Failures(3600, 10)).words("a checkpoint"))
        a checkpoint each 597 steps (59.7 s): it takes 500 ms, taken for granted a failure each 1 h
        """
        failures = self.failures
        plural = "" if failures.seen == 1 else "s"
        of = f"{failures.seen} failure{plural} seen," if failures.seen else "taken for granted"
        each = (
            f"{failures.mttf / 3600:.3g} h" if failures.mttf >= 3600 else f"{failures.mttf:.3g} s"
        )
        return (
            f"{what} each {self.steps:,} steps ({self.work:.3g} s): it takes "
            f"{1e3 * self.cost:.3g} ms, {of} a failure each {each}"
        )


def choose(cost: float, step_seconds: float, failures: Failures) -> Interval:
    """Daly's interval in whole steps, one at least.

    Args:
      cost: seconds that training stands still for a save.
    """
    cost, step_seconds = max(cost, 1e-6), max(step_seconds, 1e-6)
    wanted = intervals.daly(cost, failures.mttf) / step_seconds
    steps = min(max(round(wanted), 1), MOST_STEPS)
    return interval(steps, cost, step_seconds, failures)


def interval(steps: int, cost: float, step_seconds: float, failures: Failures) -> Interval:
    """What saving each so many steps gives."""
    work = steps * step_seconds
    predicted = intervals.goodput(work, cost, failures.mttf, failures.recovery)
    return Interval(steps, work, cost, failures, predicted)
