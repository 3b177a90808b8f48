"""The interval between a run's saves, computed from the run's measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.heartbeat import intervals
from jaxdist.types import JsonObject

RECOVERY = ("stop", "restart", "restore", "first_step")
"""The parts of a recovery, for each of which an agent records the seconds."""
MOST_STEPS = 2**30


@dataclass(frozen=True)
class Failures:
    """The failures of a run: their rate, and the time of a recovery.

    Attributes:
      mttf: the mean time between two failures, in seconds.
      recovery: the time from a failure until work continues, in seconds.
      seen: the number of failures so far; if it is 0, `mttf` and `recovery` are assumptions.
    """

    mttf: float
    recovery: float
    seen: int = 0


def failures_of(events: Sequence[JsonObject], now: float, prior: Failures) -> Failures:
    """Return the mean times between failures and of a recovery, from an agent's journal.

    Args:
      now: the current time, in seconds since 1970.
      prior: the assumptions that are returned before the first failure. The recovery of `prior` is
        also used until a recovery has been measured.
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
    """The interval between two saves, with the quantities from which it was computed.

    Attributes:
      steps: the number of steps between two saves.
      work: the time that the steps between two saves take, in seconds.
      cost: the time for which a save blocks training, in seconds.
      failures: the failures on which the interval is based.
      predicted: the predicted share of the time whose work is kept, if failures occur at random
        times.
    """

    steps: int
    work: float
    cost: float
    failures: Failures
    predicted: float

    def words(self, what: str) -> str:
        """Return a description of the interval, as one line.

        >>> print(choose_interval(0.5, 0.1, Failures(3600, 10)).words("a checkpoint"))
        a checkpoint every 597 steps (59.7 s), which takes 500 ms; assumed: a failure every 1 h
        """
        failures = self.failures
        plural = "" if failures.seen == 1 else "s"
        of = f"{failures.seen} failure{plural} seen," if failures.seen else "assumed:"
        each = (
            f"{failures.mttf / 3600:.3g} h" if failures.mttf >= 3600 else f"{failures.mttf:.3g} s"
        )
        return (
            f"{what} every {self.steps:,} steps ({self.work:.3g} s), which takes "
            f"{1e3 * self.cost:.3g} ms; {of} a failure every {each}"
        )


def choose_interval(cost: float, step_seconds: float, failures: Failures) -> Interval:
    """Return Daly's interval between saves, rounded to a whole number of steps.

    The number of steps is from 1 to `MOST_STEPS`.

    Args:
      cost: the time for which a save blocks training, in seconds.
      step_seconds: the time of a step, in seconds.
    """
    cost, step_seconds = max(cost, 1e-6), max(step_seconds, 1e-6)
    wanted = intervals.daly(cost, failures.mttf) / step_seconds
    steps = min(max(round(wanted), 1), MOST_STEPS)
    return interval(steps, cost, step_seconds, failures)


def interval(steps: int, cost: float, step_seconds: float, failures: Failures) -> Interval:
    """Return the interval of `steps` steps, with the predicted share of kept work."""
    work = steps * step_seconds
    predicted = intervals.goodput(work, cost, failures.mttf, failures.recovery)
    return Interval(steps, work, cost, failures, predicted)
