"""The progress of a run, as a bar that is redrawn in a terminal, or as plain lines in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxdist.metrics.rates import (
    Efficiency,
    SmoothedStepTime,
    format_duration,
    format_loss,
    format_rate,
    format_step_time,
)

Unit = Literal["tokens", "examples"]

_REFRESHES_PER_SECOND = 4
_SHORTEST_BAR, _LONGEST_BAR = 8, 40


@dataclass(eq=False)
class Progress:
    """A context manager that displays step, loss, rate, step time and remaining time.

    In a terminal, a thread redraws one line a few times per second, and `update` only stores
    numbers. In a file, a pipe or a terminal without a size (such as the terminal that mpirun gives
    to a process), lines are printed: for the first step, for the last step, and about every
    `seconds_between_lines`.

    Attributes:
      total_steps: the step at which the run ends.
      step: the number of steps that were taken.
      unit: the unit of the rate, "tokens" or "examples".
      units_per_step: the number of units in a step, over all devices; the number may change later.
      console: the console for the output.
      enabled: whether anything is shown. The value is False in every process except process 0.
      efficiency: the figures for the MFU, or None if the peak of the devices is unknown.
      seconds_between_lines: the interval between plain lines, in seconds.
      clock: a monotonic clock in seconds, which tests replace.

    >>> import io
    >>> console = Console(file=io.StringIO())
    >>> with Progress(2000, 0, "tokens", 16_384, console) as progress:
    ...     for step in range(1, 2001):
    ...         progress.update(step, loss=1.834, step_seconds=0.0397)
    >>> print(console.file.getvalue().splitlines()[-1])
    step 2000/2000  loss 1.834  412,695 tokens/s  40 ms/step  0:00 left
    """

    total_steps: int
    step: int
    unit: Unit
    units_per_step: int
    console: Console = field(default_factory=Console)
    enabled: bool = True
    _: KW_ONLY
    efficiency: Efficiency | None = None
    seconds_between_lines: float = 10.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._loss = float("nan")
        self._step_time = SmoothedStepTime()
        self._next_line = 0.0
        self._live: Live | None = None
        if self.enabled and _can_redraw(self.console):
            self._live = Live(
                console=self.console,
                get_renderable=self._bar,
                refresh_per_second=_REFRESHES_PER_SECOND,
            )

    def update(self, step: int, *, loss: float, step_seconds: float) -> None:
        """Record that the step `step` is done; a call takes microseconds.

        Args:
          step: the number of steps that were taken, including those before this process started.
          loss: the loss as a number on the host; a device array would make the loop wait.
          step_seconds: the wall time of a step, in seconds.
        """
        self.step = step
        self._loss = loss
        self._step_time.add(step_seconds)
        if self._live is not None or not self.enabled:
            return
        now = self.clock()
        first = self._step_time.count == 1
        if first or step >= self.total_steps or now >= self._next_line:
            self._next_line = now + self.seconds_between_lines
            self._print(self._first_line(step_seconds) if first else self._line())

    def evaluation(
        self, step: int, metrics: Mapping[str, float], *, split: str = "heldout"
    ) -> None:
        """Print the means of an evaluation, above the bar if a bar is shown."""
        numbers = [f"{name} {format_loss(float(value))}" for name, value in metrics.items()]
        self.note(self._joined(f"step {step} {split}", *numbers))

    def note(self, text: str) -> None:
        """Print a line, above the bar if a bar is shown."""
        if self.enabled:
            self._print(text)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _joined(self, *parts: str) -> str:
        """Join the parts to a line, without the last parts if the line would be too long."""
        kept = list(parts)
        while len(kept) > 1 and len("  ".join(kept)) > self.console.width:
            kept.pop()
        return "  ".join(kept)

    def _first_line(self, step_seconds: float) -> str:
        return self._joined(
            f"step {self.step}/{self.total_steps}",
            f"loss {format_loss(self._loss)}",
            f"{step_seconds:.1f} s for this step, compilation included",
        )

    def _line(self) -> str:
        return self._joined(f"step {self.step}/{self.total_steps}", *self._numbers())

    def _numbers(self) -> list[str]:
        """Return loss, rate, step time and remaining time as texts, or [] before the first step."""
        if not self._step_time.count:
            return []
        seconds = self._step_time.seconds
        rate = self.units_per_step / seconds if seconds > 0 else float("inf")
        left = seconds * max(self.total_steps - self.step, 0)
        return [
            f"loss {format_loss(self._loss)}",
            f"{format_rate(rate)} {self.unit}/s",
            format_step_time(seconds),
            *(f"{100 * value:.1f}% MFU" for name, value in self.measured(seconds) if name == "mfu"),
            f"{format_duration(left)} left",
        ]

    def measured(self, step_seconds: float) -> list[tuple[str, float]]:
        """Return the measures of `efficiency` for a step of this duration.

        Without `efficiency` there are no measures.
        """
        if self.efficiency is None:
            return []
        return [*self.efficiency.of(self.units_per_step, step_seconds).items()]

    def _bar(self) -> RenderableType:
        total = max(self.total_steps, 1)
        numbers = self._numbers() or ["compiling the first step"]
        share = f"{self.step / total:4.0%}"
        text = self._joined(share, f"{self.step}/{self.total_steps}", *numbers)
        room = min(self.console.width - len(text) - 2, _LONGEST_BAR)
        if room < _SHORTEST_BAR:
            return Group(Text(text, no_wrap=True, overflow="crop"))
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=total, completed=min(self.step, total), width=room)
        line.add_row(bar, Text(text, no_wrap=True))
        return line


def _can_redraw(console: Console) -> bool:
    """Return whether the console is a terminal with a size, in which a line can be redrawn.

    The check of the size is needed because rich takes a log for a terminal if FORCE_COLOR is set.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    try:
        descriptor = console.file.fileno()
    except (OSError, AttributeError):
        return True  # A notebook is a terminal without a file descriptor.
    try:
        return os.get_terminal_size(descriptor).columns > 0
    except OSError:
        return False
