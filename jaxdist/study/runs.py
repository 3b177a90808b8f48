"""The runs of a study, which are not repeated after an interruption of the study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

from rich.console import Console

from jaxdist.data.cache import cache_directory
from jaxdist.experiment import Experiment
from jaxdist.runtime import compilation_cache
from jaxdist.study.files import write_study
from jaxdist.study.trainer import ConfigTrainer
from jaxdist.study.trial import OutcomeJournal, TrialOutcome, TrialT
from jaxdist.study.watch import Watch
from jaxdist.types import JsonObject


class Runs(Generic[TrialT]):
    """A function that runs a trial, unless this study or its journal already has the outcome.

    Args:
      trainer: the trainer that runs a trial.
      journal: the journal of finished runs.
      watch: the display of the current trial and the remaining time.
    """

    def __init__(
        self, trainer: ConfigTrainer[TrialT], journal: OutcomeJournal[TrialT], watch: Watch
    ) -> None:
        self._trainer, self._journal, self.watch = trainer, journal, watch
        self._found: dict[str, TrialOutcome[TrialT]] = {}

    def __call__(self, trial: TrialT) -> TrialOutcome[TrialT]:
        """Return the outcome of a trial; the trial is run only if its outcome is not known yet."""
        key = self._trainer.identity(trial)
        outcome = self._found.get(key) or self._journal.get(key)
        if outcome is None:
            self.watch.begin(str(trial))
            outcome = self._trainer(trial)
            self._journal.add(key, outcome)
        if key not in self._found:
            self._found[key] = outcome
            self.watch.took(outcome.seconds)
        return outcome

    @property
    def outcomes(self) -> tuple[TrialOutcome[TrialT], ...]:
        """The outcomes of all trials so far, in the order of their first use."""
        return tuple(self._found.values())


@contextmanager
def runs_of(
    trainer: ConfigTrainer[TrialT],
    journal: OutcomeJournal[TrialT],
    sizes: Iterable[int],
    console: Console,
) -> Iterator[Runs[TrialT]]:
    """Yield the runs of a study.

    If the study is interrupted, the path of the journal is printed.

    Args:
      trainer: the trainer that runs a trial.
      journal: the journal of finished runs.
      sizes: the sizes of the study's parts, as `Watch` takes them.
      console: the console that shows the progress.
    """
    compilation_cache.enable(cache_directory() / "compiled")
    with Watch(sizes, console) as watch:
        runs = Runs(trainer, journal, watch)
        try:
            yield runs
        except KeyboardInterrupt:
            console.print(
                (
                    f"{len(runs.outcomes)} runs are saved in {journal.path}; the same command "
                    "continues the study"
                ),
                soft_wrap=True,
                markup=False,
            )
            raise


def publish(text: str, report: JsonObject, json_file: Path | None, console: Console) -> None:
    """Print the results of a study, and write them to a JSON file if `json_file` is given.

    Args:
      text: the results as text: the caption, the table and the conclusions.
      report: the results as JSON values.

    Raises:
      RunError: the file cannot be written.
    """
    console.print(f"\n{text}", soft_wrap=True, markup=False)
    write_study(json_file, report)


def trained_on(experiment: Experiment, middle: str) -> str:
    """Return the first line of a caption, with the model, its data and the devices.

    Args:
      experiment: the experiment that the caption describes.
      middle: a text about the runs, which is put between the data and the devices.
    """
    mesh = experiment.layout.mesh
    shape = ", ".join(f"{axis}: {size}" for axis, size in mesh.shape.items())
    return (
        f"{experiment.config.model.type} on {experiment.dataset.description}; {middle}; "
        f"mesh {{{shape}}} on {mesh.devices.size} x {mesh.devices.flat[0].device_kind}."
    )
