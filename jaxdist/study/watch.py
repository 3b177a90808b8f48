"""The progress of a study: a bar in a terminal, and a line for each part that is finished."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxdist.metrics.rates import format_duration


class Watch:
    """A context manager that displays the current trial and the remaining time.

    Args:
      sizes: the sizes of the study's parts, in order. Parts of similar size are assumed to take
        similar times.
      console: the console for the output.
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
        """Show that a trial starts.

        Args:
          trial: a description of the trial.
        """
        self._bar.update(self._task, description=trial)

    def took(self, seconds: float) -> None:
        """Add the time of a trial to the current part, even if an earlier study ran the trial."""
        self._spent += seconds

    def done(self, found: str) -> None:
        """Show that the current part is finished.

        Args:
          found: the result of the part, as a line.
        """
        size = self._left.pop(0)
        self._seconds.setdefault(size, []).append(self._spent)
        self._spent = 0.0
        left = f"{format_duration(self.seconds_left())} left" if self._left else "done"
        self._console.print(f"{found}; {left}", soft_wrap=True, markup=False)
        self._bar.update(self._task, advance=1, left=left)

    def seconds_left(self) -> float:
        """Return the estimated seconds of the remaining parts.

        The estimate for a part is the mean time of the finished parts with the nearest size.
        """
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
