"""The contract of a strategy, and what it is given to run.

A strategy decides what the processes of a run do: which of them take steps, on which devices, and
what happens between steps. A new one is a new config in `config.py`, what checks it in
`jaxdist.experiment.strategies`, and what runs it in `jaxdist.run.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxdist.data.loader import Loader
from jaxdist.metrics.account import Account
from jaxdist.optim.build import Optimizer
from jaxdist.optim.common import OptimizerConfig
from jaxdist.sharding import Dims, Layout
from jaxdist.train.loop import Hooks
from jaxdist.train.plan import TrainConfig
from jaxdist.train.state import Outer, TrainState
from jaxdist.train.step import Program
from jaxdist.types import Params


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


class StepHooks(Hooks, Protocol):
    """What happens beside the steps of a run that may be told to stop."""

    stopped: bool
    """Whether a boundary has ended the run."""

    @property
    def told_to_stop(self) -> bool:
        """Whether this process was told to end the run, perhaps in the middle of a step."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its next step.

    Attributes:
      state: a fresh one, or that of the newest checkpoint; steps take its memory.
      stages: of the whole run; `state.step` says where in them it stands.
      hooks: what happens between steps.
      enter: to be called with a stage before its first step.
      optim: what the program's optimizer was built from.
      directory: of the run; a process that reads its config builds the same.
      note: tells the user a line.
      record: writes down what servers and workers count, at a step.
      account: of this process's time; what hooks do is in it already.
    """

    state: TrainState
    stages: Sequence[TrainStage]
    hooks: StepHooks
    enter: Callable[[TrainStage], None] = lambda stage: None
    optim: OptimizerConfig | None = None
    directory: Path | None = None
    note: Callable[[str], None] = print
    record: Callable[[int, Mapping[str, float]], None] = lambda step, values: None
    account: Account = field(default_factory=Account)


@dataclass(frozen=True)
class RunSettings:
    """What a strategy has to go with.

    Attributes:
      params: shapes of the model's parameters.
      dims: logical dims of each, by name.
    """

    total_steps: int
    train: TrainConfig
    optim: OptimizerConfig
    layout: Layout
    optimizer: Optimizer
    params: Params
    dims: Mapping[str, Dims]


class Strategy(Protocol):
    """The config of how a run is made of steps and processes."""

    def outer(self) -> Outer | None:
        """Return what exchanges parameters between steps; None where nothing does."""
        ...
