"""What a run tells while it lasts: the step that it is at, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxdist.metrics import goodput
from jaxdist.metrics.account import Account
from jaxdist.metrics.energy.tally import SPLIT as ENERGY
from jaxdist.metrics.energy.tally import Tally
from jaxdist.metrics.writer import Records
from jaxdist.run.hooks.loop import Cadence, LoopHook, Moment


@dataclass
class Tell(LoopHook):
    """Says to whoever watches which step was taken, and when the next is waited for."""

    tell: Callable[[int], None]
    wait: Callable[[], None]

    def waiting(self, step: int) -> None:
        self.wait()

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        self.tell(step)


@dataclass
class Goodput(LoopHook):
    """Writes down where time and energy went: with the log, though not each time, and at each save.

    A record stands at each step that a later life may go on from, so that what is lost is known.

    Attributes:
      life: number of this process among those of the run, from 1.
      step: the last that was taken.
      tally: of energy, where it is measured.
      seconds_between: two records are at least a hundredth of the time so far apart (a
        tenth of a second at least), but for saves; so long at most.
    """

    cadence: Cadence
    account: Account
    life: int
    writer: Records
    step: int
    tally: Tally | None = None
    seconds_between: float = 10.0
    _next: float = 0.0

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        self.step = step
        if self.tally is not None:
            self.tally.stepped()
        if self.cadence.due(step) and time.monotonic() >= self._next:
            self.write()

    def at(self, moment: Moment) -> None:
        if moment.saved:
            self.write()

    def write(self) -> None:
        """What the account holds by now."""
        values = goodput.values_of(self.account, self.life)
        # A record takes a quarter of a millisecond.
        apart = max(0.01 * values["wall_seconds"], 0.1)
        self._next = time.monotonic() + min(apart, self.seconds_between)
        self.writer.write(self.step, values, split=goodput.SPLIT)
        if self.tally is not None:
            self.writer.write(self.step, self.tally.values(self.life), split=ENERGY)
