"""The progress of a study: a bar in a terminal, a line for each part anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxdist.metrics.rates import format_duration


class Watch:
    """Shows what runs and how long the rest may take; a context manager.

    Args:
      sizes: of each part to come, in their order; parts of near sizes take about equally long.
      console: where to print.
    """

    def __init__(self, sizes: Iterable[int], console: Console) -> None:
        self._left = list(sizes)
        self._seconds: dict[int, list[float]] = {}
        self._spent = 0.0
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(
            *columns, console=console, disable=not console.is_terminal, transient=True
        )
        self._task = self._bar.add_task("", total=len(self._left), left="")

    def begin(self, trial: str) -> None:
        """Show that a trial begins."""
        self._bar.update(self._task, description=trial)

    def took(self, seconds: float) -> None:
        """Record the time of a trial of the current part, run now or before an interruption."""
        self._spent += seconds

    def done(self, found: str) -> None:
        """Show that the current part is done, and its result."""
        size = self._left.pop(0)
        self._seconds.setdefault(size, []).append(self._spent)
        self._spent = 0.0
        left = f"{format_duration(self.seconds_left())} left" if self._left else "done"
        self._console.print(f"{found}; {left}", soft_wrap=True, markup=False)
        self._bar.update(self._task, advance=1, left=left)

    def seconds_left(self) -> float:
        """Return the seconds of the parts to come, each as one of the nearest size so far."""
        total = 0.0
        for size in self._left:
            known = self._seconds[min(self._seconds, key=lambda seen: abs(seen - size))]
            total += sum(known) / len(known)
        return total

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
