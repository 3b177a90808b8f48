"""Hooks that report a run's current step, and how the run uses its time."""

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
    """A hook that reports to the agent each finished step, and each wait for the next step."""

    tell: Callable[[int], None]
    wait: Callable[[], None]

    def waiting(self, step: int) -> None:
        self.wait()

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        self.tell(step)


@dataclass
class GoodputHook(LoopHook):
    """A hook that records the use of time and energy, at log steps and after each save.

    Since each save has a record, a report can count the work that is lost by a restart from the
    save.

    Attributes:
      life: the number of this attempt of the run, counted from 1.
      step: the last step that was taken.
      tally: the tally of energy, or None if energy is not measured.
      seconds_between: the upper limit, in seconds, of the time between two records at log steps.
        Below this limit, it is a hundredth of the elapsed time, but at least 0.1 s.
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
        """Write a record of the time and energy that the attempt has used so far."""
        values = goodput.account_values(self.account, self.life)
        # A record takes a quarter of a millisecond to write; the pause limits this cost.
        apart = max(0.01 * values["wall_seconds"], 0.1)
        self._next = time.monotonic() + min(apart, self.seconds_between)
        self.writer.write(self.step, values, split=goodput.SPLIT)
        if self.tally is not None:
            self.writer.write(self.step, self.tally.values(self.life), split=ENERGY)
