"""How far a study is: a bar in a terminal, a line for each cell anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxdist.metrics.rates import format_duration
from jaxdist.study.plan import StudyCell
from jaxdist.study.table import shown
from jaxdist.study.trial import Trial


class Watch:
    """Shows what runs and how long the rest may take; a context manager.

    Args:
      batches: the batch size of each cell to come, in their order.
      console: where to print.
    """

    def __init__(self, batches: Iterable[int], console: Console) -> None:
        self._left = list(batches)
        self._seconds: dict[int, list[float]] = {}
        self._spent = 0.0
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(
            *columns, console=console, disable=not console.is_terminal, transient=True
        )
        self._task = self._bar.add_task("", total=len(self._left), left="")

    def trial(self, trial: Trial) -> None:
        """A trial begins."""
        text = f"{trial.optimizer}, batch {trial.batch_size}, learning rate "
        text += f"{trial.learning_rate:g}, seed {trial.seed}"
        self._bar.update(self._task, description=text)

    def took(self, seconds: float) -> None:
        """Record the time of a trial of the current cell, run now or before an interruption."""
        self._spent += seconds

    def cells(self, cells: tuple[StudyCell, ...]) -> None:
        """The cells of one optimizer and batch size are done."""
        done = self._left.pop(0)
        self._seconds.setdefault(done, []).append(self._spent)
        self._spent = 0.0
        left = f"{format_duration(self.seconds_left())} left" if self._left else "done"
        found = ", ".join(f"{shown(c)} {'tuned' if c.tuned else 'by rule'}" for c in cells)
        where = f"{cells[0].optimizer}, batch {cells[0].batch_size}"
        self._console.print(f"{where}: {found}; {left}", soft_wrap=True, markup=False)
        self._bar.update(self._task, advance=1, left=left)

    def seconds_left(self) -> float:
        """Seconds that the cells to come may take: each as one of the nearest batch size so far."""
        total = 0.0
        for batch in self._left:
            known = self._seconds[min(self._seconds, key=lambda seen: abs(seen - batch))]
            total += sum(known) / len(known)
        return total

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
