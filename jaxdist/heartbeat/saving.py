"""The interval between a run's saves, as a function of the run's own measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.heartbeat import intervals
from jaxdist.types import JsonObject

RECOVERY = ("stop", "restart", "restore", "first_step")
"""The parts of a recovery whose seconds an agent records once a generation takes steps."""
MOST_STEPS = 2**30


@dataclass(frozen=True)
class Failures:
    """The failures of a run, and the cost of one.

    Attributes:
      mttf: mean seconds between two failures.
      recovery: seconds from a failure until work continues.
      seen: the number of failures so far; if it is 0, `mttf` and `recovery` are assumptions.
    """

    mttf: float
    recovery: float
    seen: int = 0


def failures_of(events: Sequence[JsonObject], now: float, prior: Failures) -> Failures:
    """Derive the mean time between failures, and of a recovery, from an agent's journal.

    Args:
      now: seconds since 1970.
      prior: the values before the first failure; the recovery of `prior` is used until a recovery
        has been measured.
    """
    begun = [event for event in events if event["event"] == "begun"]
    lost = sum(event["event"] == "lost" for event in events)
    if not begun or not lost:
        return prior
    took = [sum(float(event[f"{part}_seconds"]) for part in RECOVERY) for event in begun]
    mttf = max((now - float(begun[0]["time"]) + took[0]) / lost, 1.0)
    # The start of the first generation does not count as a recovery.
    later = [seconds for event, seconds in zip(begun, took, strict=True) if event["generation"] > 1]
    return Failures(mttf, statistics.median(later) if later else prior.recovery, lost)


@dataclass(frozen=True)
class Interval:
    """The interval between two saves.

    Attributes:
      steps: the number of steps between two saves.
      work: the seconds that the steps between two saves take.
      cost: the seconds for which a save blocks training.
      failures: the failures on which the interval is based.
      predicted: the predicted share of time that is kept work, with failures at random times.
    """

    steps: int
    work: float
    cost: float
    failures: Failures
    predicted: float

    def words(self, what: str) -> str:
        """Describe the interval in one line.

        >>> print(choose_interval(0.5, 0.1, Failures(3600, 10)).words("a checkpoint"))
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


def choose_interval(cost: float, step_seconds: float, failures: Failures) -> Interval:
    """Return Daly's interval, rounded to a whole number of steps, which is at least 1.

    Args:
      cost: the seconds for which a save blocks training.
    """
    cost, step_seconds = max(cost, 1e-6), max(step_seconds, 1e-6)
    wanted = intervals.daly(cost, failures.mttf) / step_seconds
    steps = min(max(round(wanted), 1), MOST_STEPS)
    return interval(steps, cost, step_seconds, failures)


def interval(steps: int, cost: float, step_seconds: float, failures: Failures) -> Interval:
    """Return the interval of `steps` steps, with the share of time that it is predicted to keep."""
    work = steps * step_seconds
    predicted = intervals.goodput(work, cost, failures.mttf, failures.recovery)
    return Interval(steps, work, cost, failures, predicted)
