"""The result of a run, which `jaxdist.fit` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.checkpoint.identity import read_identity
from jaxdist.experiment import Experiment
from jaxdist.metrics.goodput import joined_lives
from jaxdist.metrics.report import plain, write_json
from jaxdist.metrics.writer import read_metrics
from jaxdist.run.hooks.calls import last_of
from jaxdist.train.state import TrainState
from jaxdist.types import JsonObject


@dataclass(frozen=True)
class FitResult:
    """The result of a run that is complete or was stopped.

    Attributes:
      directory: the run directory, with its config, metrics and checkpoints.
      experiment: the experiment that was built from the config. Its `program` can evaluate, and can
        train further.
      state: the last training state, which occupies device memory until it is released.
      stopped_by: the reason why the run stopped before its last step (a signal, a preemption
        notice, or the reason that a hook gave), or None if the run took its last step.
      exit_code: the exit code that `jaxdist train` would have: 0, or 75 if the run was stopped from
        outside. After 75, `resume=True` continues the run.
    """

    directory: Path
    experiment: Experiment
    state: TrainState
    stopped_by: str | None
    exit_code: int

    @property
    def step(self) -> int:
        """The number of steps taken, including the steps before a resume."""
        return int(self.state.step)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last logged metrics of training by name, read from the run directory."""
        return last_of(self.records(), "train")

    @property
    def heldout(self) -> Mapping[str, float]:
        """The means of the last evaluation by name, or an empty mapping without an evaluation."""
        return last_of(self.records(), "heldout")

    def records(self) -> list[JsonObject]:
        """Return all records of `metrics.jsonl` in the run directory, in order."""
        return read_metrics(self.directory)

    def write(self, file: Path) -> None:
        """Write a summary of the ended run as JSON; only process 0 writes.

        Raises:
          RunError: the file cannot be written.
        """
        if jax.process_index() != 0:
            return
        identity, spent = read_identity(self.directory), joined_lives(self.records())
        report = {
            "run": str(self.directory),
            "id": None if identity is None else identity.id,
            "step": self.step,
            "total_steps": self.experiment.total_steps,
            "stopped_by": self.stopped_by,
            "exit_code": self.exit_code,
            "metrics": plain(self.metrics),
            "heldout": plain(self.heldout),
            "goodput": None if spent is None else spent.goodput,
        }
        write_json(file, report, what="result")
