"""The contract of a strategy, and what it is given to run.

A strategy decides what the processes of a run do: which of them take steps, on which devices, and
what happens between steps. A new one is a new file, and a name in `build.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from jaxdist.data.loader import Loader
from jaxdist.mesh import Device
from jaxdist.optim.build import Optimizer
from jaxdist.train.hooks import RunHooks
from jaxdist.train.state import Outer, TrainState
from jaxdist.train.step import Program


@dataclass(frozen=True)
class TrainStage:
    """A stretch of a run at one batch size: steps `first_step + 1` to `last_step`.

    Attributes:
      loader: its step 0 is the first batch of the stage.
    """

    first_step: int
    last_step: int
    batch_size: int
    program: Program
    loader: Loader


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its next step.

    Attributes:
      state: a fresh one, or that of the newest checkpoint; steps take its memory.
      stages: of the whole run; `state.step` says where in them it stands.
      hooks: what happens between steps.
      enter: to be called with a stage before its first step.
    """

    state: TrainState
    stages: Sequence[TrainStage]
    hooks: RunHooks
    enter: Callable[[TrainStage], None] = lambda stage: None


class Job(Protocol):
    """A run that is to be done."""

    def prepared(self, devices: Sequence[Device] | None = None) -> AbstractContextManager[Prepared]:
        """Build the run on these devices, or on all; within the context its files are open.

        It may be entered again when it was left, on other devices too: the run then goes on from
        the newest checkpoint, and from its beginning where there is none.

        Raises:
          JaxdistError: it cannot be built there; no checkpoint can be trusted.
        """
        ...


class Strategy(Protocol):
    """How a run is made of steps and processes."""

    def outer(self, optimizer: Optimizer) -> Outer | None:
        """What exchanges parameters between steps; None where nothing does.

        Raises:
          ConfigError: it does not go with this optimizer.
        """
        ...

    def notices(self, total_steps: int) -> tuple[str, ...]:
        """Settings that do nothing, or not what one may expect, in a run of so many steps."""
        ...

    def run(self, job: Job) -> TrainState:
        """Do what this process has to do; the last state that it knows.

        Raises:
          JaxdistError: anything that the user can mend.
        """
        ...
