"""The contract of a strategy, and the arguments with which it runs.

A strategy determines the processes of a run: which of them take steps, on which devices, and the
exchange between steps. A new strategy is a new config in `config.py`, its checks in
`jaxdist.experiment.strategies`, and its runner in `jaxdist.run.strategies`.
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
from jaxdist.tables.batch import TableRows
from jaxdist.train.loop import Hooks
from jaxdist.train.plan import TrainConfig
from jaxdist.train.state import Outer, TrainState
from jaxdist.train.step import Program
from jaxdist.types import Params


@dataclass(frozen=True)
class TrainStage:
    """A stretch of a run with a single batch size: steps `first_step + 1` to `last_step`.

    Attributes:
      loader: loader whose step 0 is the first batch of the stage.
    """

    first_step: int
    last_step: int
    batch_size: int
    program: Program
    loader: Loader


class StepHooks(Hooks, Protocol):
    """The work between the steps of a run that may be asked to stop."""

    stopped: bool
    """Whether a boundary has ended the run."""

    @property
    def told_to_stop(self) -> bool:
        """Return whether this process was asked to end the run, perhaps in the middle of a step."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its next step.

    Attributes:
      state: the initial state, or the state of the newest checkpoint; a step reuses its memory.
      stages: all stages of the run; `state.step` is the position in them.
      hooks: the work between steps.
      enter: function to call with a stage before its first step.
      optim: config of the program's optimizer.
      directory: directory of the run. A process that reads the config there builds the same
        program.
      note: prints a line for the user.
      record: records the counts of servers and workers at a step.
      account: account of this process's time, in which hooks already count their own time.
      rows: reader of the table rows that a batch needs, if servers hold the model's tables.
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
    rows: TableRows | None = None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that a strategy receives.

    Attributes:
      params: shapes of the model's parameters.
      dims: logical dims of each parameter, by name.
    """

    total_steps: int
    train: TrainConfig
    optim: OptimizerConfig
    layout: Layout
    optimizer: Optimizer
    params: Params
    dims: Mapping[str, Dims]


class Strategy(Protocol):
    """The config of a strategy."""

    def outer(self) -> Outer | None:
        """Return the exchange of parameters between steps, or None for no exchange."""
        ...
