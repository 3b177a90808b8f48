"""The contract of a user's hooks: the methods that a run calls.

Nothing here imports jax, so that a hook can be defined before the environment is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxdist.experiment import Experiment
    from jaxdist.types import JsonObject


@dataclass(frozen=True)
class Run:
    """The run that calls a hook.

    Attributes:
      id: identity of the run, which does not change when it is resumed.
      directory: directory of the run's files.
      experiment: its config, data, program and plan.
      first_step: number of steps that were taken before this process began.
      total_steps: the step at which the run ends.
      say: prints a line, above the progress bar if there is one.
      stop: asks the run to end after the current step, with a checkpoint, for the given reason; the
        run is then complete, with exit code 0. All processes stop after the same step.
    """

    id: str
    directory: Path
    experiment: Experiment
    first_step: int
    total_steps: int
    say: Callable[[str], None]
    stop: Callable[[str], None]


class StepMetrics(Mapping[str, float]):
    """The metrics of a step by name, which are copied from the device when the first is read.

    The copy does not wait for a computation, since the loop passes the metrics of a step to hooks
    only after the step has finished.

    Attributes:
      seconds: wall time of the step.
    """

    def __init__(self, names: Sequence[str], values: Any, seconds: float) -> None:
        self._names, self._values, self.seconds = names, values, seconds
        self._read: dict[str, float] = {}

    def _all(self) -> dict[str, float]:
        if not self._read:
            self._read = dict(zip(self._names, np.asarray(self._values).tolist(), strict=True))
        return self._read

    def __getitem__(self, name: str) -> float:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
      step: number of steps that were taken, as far as this process knows.
      stopped_by: the cause of an end before the last step: a signal, a notice, or the reason that a
        hook gave, or None if the run took its last step or failed.
      complete: whether the run took its last step, or a hook ended it.
      error: the error with which the run failed, or None.
      metrics: the last logged metrics of training.
      heldout: means of the last evaluation.
      goodput: the time of the run by use over all its restarts, as in `jaxdist report --json`; like
        `metrics` and `heldout`, empty in each process but the first.
    """

    step: int
    stopped_by: str | None = None
    complete: bool = False
    error: BaseException | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    heldout: Mapping[str, float] = field(default_factory=dict)
    goodput: JsonObject = field(default_factory=dict)


class Hook:
    """A base class of users' hooks: override the methods that you need; the others do nothing.

    Calls come from the thread that trains, in the order of the hooks, and training waits for them.
    A hook that raises ends the run with a message that names it; `end` is called on all hooks even
    then.

    Attributes:
      every_process: whether each process of the run calls the hook, or only process 0.
    """

    every_process: bool = False

    def start(self, run: Run) -> None:
        """Prepare for the first step, which comes next; the training state exists. Called once."""

    def step(self, run: Run, step: int, metrics: StepMetrics) -> None:
        """Receive the metrics of each finished step, in order, while the next step runs.

        Args:
          step: number of steps taken.
        """

    def evaluation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        """Receive the held-out means at a step."""

    def save(self, run: Run, step: int, path: Path) -> None:
        """Receive the path of a checkpoint that has been begun.

        Args:
          path: directory of the checkpoint, which exists as soon as the checkpoint is complete: at
            the latest at the next save or at the run's end.
        """

    def record(self, run: Run, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receive a record that was just written to `metrics.jsonl`; only on process 0.

        Args:
          split: the subject of the numbers: train, heldout, goodput, energy, servers, ...
        """

    def end(self, run: Run, outcome: Outcome) -> None:
        """Finish: the run has saved and closed all its files, or has failed. Called once."""
