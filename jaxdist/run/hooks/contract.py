"""The contract of a user's hooks: the methods that a run calls.

This module does not import jax, so that a hook can be defined before the environment is prepared.
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
    """The run that calls a hook, as the hook sees it.

    Attributes:
      id: the id of the run, which does not change when the run is resumed.
      directory: the directory of the run's files.
      experiment: the config, data, program and plan of the run.
      first_step: the number of steps that were taken before this process began.
      total_steps: the step at which the run ends.
      say: the function that prints a line, above the progress bar if a bar is shown.
      stop: the function that, called with a reason, asks the run to save a checkpoint and end after
        the current step. The run is then complete and has exit code 0. All processes stop after the
        same step.
    """

    id: str
    directory: Path
    experiment: Experiment
    first_step: int
    total_steps: int
    say: Callable[[str], None]
    stop: Callable[[str], None]


class StepMetrics(Mapping[str, float]):
    """The metrics of a step by name, which are copied from the device when the first value is read.

    The copy does not wait for a computation, since the loop passes the metrics of a step to hooks
    only after the step has finished.

    Attributes:
      seconds: the wall time of the step, in seconds.
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
    """The description of how a run ended.

    Attributes:
      step: the number of steps that were taken, as far as this process knows.
      stopped_by: the reason why the run ended before the last step (a signal, a preemption
        notice, or the reason that a hook gave), or None if the run took its last step or failed.
      complete: whether the run took its last step, or a hook ended it.
      error: the error with which the run failed, or None if it did not fail.
      metrics: the last logged metrics of training.
      heldout: the means of the last evaluation.
      goodput: the time that each activity took over all attempts of the run, as in
        `jaxdist report --json`. The mappings `metrics`, `heldout` and `goodput` are empty in every
        process except process 0.
    """

    step: int
    stopped_by: str | None = None
    complete: bool = False
    error: BaseException | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    heldout: Mapping[str, float] = field(default_factory=dict)
    goodput: JsonObject = field(default_factory=dict)


class Hook:
    """The base class of users' hooks, whose methods do nothing unless a subclass overrides them.

    The thread that trains calls the hooks in their order, and waits for each call. If a hook raises
    an error, the run ends with a message that names the hook. Even then `end` is called on all
    hooks.

    Attributes:
      every_process: whether every process of the run calls the hook; otherwise only process 0 does.
    """

    every_process: bool = False

    def start(self, run: Run) -> None:
        """Prepare for the first step.

        The run calls this method once, when the training state exists.
        """

    def step(self, run: Run, step: int, metrics: StepMetrics) -> None:
        """Receive the metrics of each finished step, in order, while the next step runs.

        Args:
          step: the number of steps that were taken.
        """

    def evaluation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        """Receive the held-out means that were measured after a step."""

    def save(self, run: Run, step: int, path: Path) -> None:
        """Receive the path of a checkpoint whose save has begun after a step.

        Args:
          path: the directory of the checkpoint. The directory appears when the checkpoint is
            complete, at the latest before the next save or the end of the run.
        """

    def record(self, run: Run, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receive a record that was just written to `metrics.jsonl`.

        Only process 0 calls this method.

        Args:
          split: the subject of the numbers: train, heldout, goodput, energy, servers, ...
        """

    def end(self, run: Run, outcome: Outcome) -> None:
        """Clean up after the run has saved and closed all its files, or has failed.

        The run calls this method once.
        """
