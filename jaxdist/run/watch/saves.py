"""Save intervals that a run chooses itself while it trains.

The interval only determines when states are saved, so no loss or metric depends on it. Process 0
measures and chooses. Process 0 broadcasts the choice at a save, where all processes have to
synchronize anyway.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxdist.checkpoint.agree import broadcast_int
from jaxdist.heartbeat.journal import read_journal
from jaxdist.heartbeat.saving import MOST_STEPS, Failures, Interval, choose_interval, failures_of
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.goodput import INTERVALS
from jaxdist.metrics.writer import Records
from jaxdist.run.hooks.loop import Cadence

FIRST_STEPS = 10
"""The number of steps before the first save of a process. This save measures the cost of a save."""
WARM_STEPS, LEAST_STEPS = 3, 20
"""WARM_STEPS: the number of steps at the start of a process whose times are not measured.
LEAST_STEPS: the smallest number of steps from which a mean step time is computed.
"""
LAST_COSTS = 8
"""The number of recent saves that are used to compute the median cost of a save."""
OFTEN = 64
"""The largest number of saves between two choices of the interval.

The interval is chosen at saves 1, 2, 4, 8 and so on up to this number, and then at each multiple of
this number."""
CHANGED = 2.0
"""The smallest ratio of a new interval and the last printed interval, the larger divided by the
smaller, at which the new interval is printed too.
"""
_WORK = (Activity.STEP, Activity.INPUT_WAIT)


@dataclass
class Chosen(Cadence):
    """A cadence whose interval process 0 chooses from measurements, for all processes.

    Attributes:
      kind: the activity to which the account adds the time of the saves.
      what: the description of a save in messages, such as `a checkpoint`.
      run: the run directory whose journal records the failures against which the saves protect, or
        None if no journal records these failures.
      mttf: the mean time between failures, in seconds, that is assumed until the journal records a
        failure.
      say: the function that is called with lines for the user.
      writer: the writer of metrics.
      start: the step from which this process continues.
    """

    kind: Activity
    what: str
    account: Account
    run: Path | None
    mttf: float
    say: Callable[[str], None]
    writer: Records
    start: int
    _costs: list[float] = field(default_factory=list)
    _told: int | None = None

    def __post_init__(self) -> None:
        self._count, self._mark = 0, (self.start, 0.0)
        self._next, self._steps = self.start + FIRST_STEPS, FIRST_STEPS

    def due(self, step: int) -> bool:
        """Return whether a save is due after `step`."""
        if step == self.start + WARM_STEPS:
            self._begin_to_measure(step)
        return step == self.last or step >= self._next

    def saved(self, step: int, seconds: float) -> None:
        """Record that the save of `step` took `seconds`, and choose the next interval."""
        if step == self.last:
            return
        if seconds:
            self._costs = [*self._costs, seconds][-LAST_COSTS:]
            self._count += 1
        if seconds and (self._count & (self._count - 1) == 0 or self._count % OFTEN == 0):
            with self.account.within(self.kind):
                # Only process 0 has measurements, and all processes must use the same interval.
                self._steps = broadcast_int(min(self._choice(step), MOST_STEPS))
        self._next = step + self._steps

    def _begin_to_measure(self, step: int) -> None:
        """Begin to measure step times after this step, since earlier steps were slower."""
        spent = self.account.spent()
        self._mark = step, 1e-9 * sum(spent[kind] for kind in _WORK)

    def _choice(self, step: int) -> int:
        """Return the number of steps between two saves, from the measurements up to `step`."""
        spent = {kind: 1e-9 * nanoseconds for kind, nanoseconds in self.account.spent().items()}
        first, work = self._mark
        step_seconds = (sum(spent[kind] for kind in _WORK) - work) / max(step - first, 1)
        if step - first >= LEAST_STEPS:
            self._begin_to_measure(step)
        # Until a recovery has been measured, its estimate is the time that this process took to
        # start.
        began = sum(spent[kind] for kind in (Activity.START, Activity.RECOVERY, Activity.COMPILE))
        prior = Failures(self.mttf, began)
        events = [] if self.run is None else read_journal(self.run)
        failures = failures_of(events, time.time(), prior)
        cost = statistics.median(self._costs) if self._costs else 0.0
        chosen = choose_interval(cost, step_seconds, failures)
        self._tell(step, chosen)
        return chosen.steps

    def _tell(self, step: int, chosen: Interval) -> None:
        told = self._told
        if told is None or max(told, chosen.steps) > CHANGED * min(told, chosen.steps):
            self._told = chosen.steps
            self.say(f"saves  {chosen.words(self.what)}")
        values = {
            "steps": chosen.steps,
            "work_seconds": chosen.work,
            "cost_seconds": chosen.cost,
            "mttf_seconds": chosen.failures.mttf,
            "recovery_seconds": chosen.failures.recovery,
            "failures": chosen.failures.seen,
            "predicted": chosen.predicted,
        }
        named = {f"{self.kind}_{name}": value for name, value in values.items()}
        self.writer.write(step, named, split=INTERVALS)
