"""The contract of a strategy, and the arguments with which it runs.

A strategy determines which processes of a run take steps, on which devices, and the exchange
between steps. A new strategy needs a config in `config.py`, checks in
`jaxdist.experiment.strategies`, and a runner in `jaxdist.run.strategies`.
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
    """The part of a run with a single batch size: steps `first_step + 1` to `last_step`.

    Attributes:
      loader: the loader of the stage, whose step 0 is the first batch of the stage.
    """

    first_step: int
    last_step: int
    batch_size: int
    program: Program
    loader: Loader


class StepHooks(Hooks, Protocol):
    """The callbacks between the steps of a run, with a method that reports a request to stop."""

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
      state: the initial state, or the state of the newest checkpoint. A step donates the state, so
        its arrays cannot be used afterwards.
      stages: all stages of the run; `state.step` is the number of steps already taken.
      hooks: the callbacks between steps.
      enter: a function to call with a stage before its first step.
      optim: the config of the program's optimizer.
      directory: the directory of the run. A process that reads the config there builds the same
        program.
      note: a function that prints a line for the user.
      record: a function that records the counts of servers and workers at a step.
      account: the account of this process's time, to which the hooks add the time that they take.
      rows: the reader of the table rows that a batch needs, or None unless servers hold the model's
        tables.
    """

    state: TrainState
    stages: Sequence[TrainStage]
    hooks: StepHooks
    enter: Callable[[TrainStage], None]
    optim: OptimizerConfig
    directory: Path
    note: Callable[[str], None] = print
    record: Callable[[int, Mapping[str, float]], None] = lambda step, values: None
    account: Account = field(default_factory=Account)
    rows: TableRows | None = None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that a strategy receives.

    Attributes:
      params: the shapes of the model's parameters.
      dims: the logical dims of each parameter, by name.
    """

    total_steps: int
    train: TrainConfig
    optim: OptimizerConfig
    layout: Layout
    optimizer: Optimizer
    params: Params
    dims: Mapping[str, Dims]


class Strategy(Protocol):
    """The protocol of the strategies' configs."""

    def outer(self) -> Outer | None:
        """Return the exchange of parameters between steps, or None without such an exchange."""
        ...
