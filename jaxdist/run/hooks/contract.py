"""The contract of a user's hooks: what a run calls while it lasts.

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
    """The run that a hook is called by.

    Attributes:
      id: stays the same when the run goes on after an interruption.
      directory: where its files lie.
      experiment: its config, data, program and plan.
      first_step: steps that were taken before this process began.
      total_steps: the step at which the run ends.
      say: prints a line, above the bar of progress where there is one.
      stop: asks the run to end after the step under way, with a checkpoint, for the reason given:
        it has then come to its end, with exit code 0. Processes agree on the step.
    """

    id: str
    directory: Path
    experiment: Experiment
    first_step: int
    total_steps: int
    say: Callable[[str], None]
    stop: Callable[[str], None]


class StepMetrics(Mapping[str, float]):
    """The metrics of a step by name; they are copied from the device when one is first read.

    The step is done by then, so that a copy waits for no computation: the loop has waited for the
    step itself, as it does for every one, while the next is under way.

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
    """How a run has ended.

    Attributes:
      step: steps taken in all, as far as this process knows.
      stopped_by: what ended it before its last step: a signal, a notice, or the reason that a hook
        has given; None where it came to its last step or failed.
      complete: whether it has come to its end: to its last step, or to where a hook ended it.
      error: what it failed with.
      metrics: the last that were logged of training.
      heldout: means of the last evaluation.
      goodput: where the time of the run went over all its restarts, as `jaxdist report --json` has
        it; empty in each process but the first, as are `metrics` and `heldout`.
    """

    step: int
    stopped_by: str | None = None
    complete: bool = False
    error: BaseException | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    heldout: Mapping[str, float] = field(default_factory=dict)
    goodput: JsonObject = field(default_factory=dict)


class Hook:
    """Something of the user's that a run calls: override what is needed, the rest does nothing.

    Calls come from the thread that trains, in the order of the hooks, and training waits for them.
    A hook that raises ends the run with a message that names it; `end` is called on all even then.

    Attributes:
      every_process: whether each process of the run calls it, or process 0 alone.
    """

    every_process: bool = False

    def start(self, run: Run) -> None:
        """Begin: the state is there, and the first step comes next. Called once."""

    def step(self, run: Run, step: int, metrics: StepMetrics) -> None:
        """See a step that is done; called for every step, in order, while the next is under way.

        Args:
          step: steps taken in all.
        """

    def evaluation(self, run: Run, step: int, means: Mapping[str, float]) -> None:
        """See the held-out means at a step."""

    def save(self, run: Run, step: int, path: Path) -> None:
        """Hear that a checkpoint of a step is begun.

        Args:
          path: its directory, which appears when the checkpoint is whole: at the next save or at
            the run's end at the latest.
        """

    def record(self, run: Run, step: int, split: str, values: Mapping[str, float]) -> None:
        """See a record that was just written to `metrics.jsonl`; for a logger. On process 0 alone.

        Args:
          split: what the numbers are about: train, heldout, goodput, energy, servers, ...
        """

    def end(self, run: Run, outcome: Outcome) -> None:
        """End: all is saved and closed, or the run has failed. Called once for each start."""
