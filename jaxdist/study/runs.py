"""The runs of a study, each made once: what an earlier, interrupted study finished is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol

from rich.console import Console

from jaxdist.study.trial import Journal, TrialOutcome, TrialT
from jaxdist.study.watch import Watch


class Trains(Protocol[TrialT]):
    """What trains one trial."""

    def __call__(self, trial: TrialT, /) -> TrialOutcome[TrialT]: ...

    def identity(self, trial: TrialT) -> str:
        """The same for two trials that must come out the same."""
        ...


class Runs(Generic[TrialT]):
    """Runs trials that neither this study nor its journal has an outcome of.

    Args:
      trainer: runs one.
      journal: of finished runs.
      watch: is told what runs, and for how long.
    """

    def __init__(self, trainer: Trains[TrialT], journal: Journal[TrialT], watch: Watch) -> None:
        self._trainer, self._journal, self._watch = trainer, journal, watch
        self._found: dict[str, TrialOutcome[TrialT]] = {}

    def __call__(self, trial: TrialT) -> TrialOutcome[TrialT]:
        """The trial's outcome."""
        key = self._trainer.identity(trial)
        outcome = self._found.get(key) or self._journal.get(key)
        if outcome is None:
            self._watch.begin(str(trial))
            outcome = self._trainer(trial)
            self._journal.add(key, outcome)
        if key not in self._found:
            self._found[key] = outcome
            self._watch.took(outcome.seconds)
        return outcome

    @property
    def outcomes(self) -> tuple[TrialOutcome[TrialT], ...]:
        """Of all trials so far, in the order that they were first asked for."""
        return tuple(self._found.values())

    @contextmanager
    def told(self, console: Console) -> Iterator[None]:
        """Inside, an interruption says where the runs are kept."""
        try:
            yield
        except KeyboardInterrupt:
            console.print(
                f"{len(self._found)} runs are kept in {self._journal.path}; "
                "the same command goes on",
                soft_wrap=True,
                markup=False,
            )
            raise
