"""The configuration of an experiment, and errors that name the setting that causes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import Config, Count, Document, Problem, problems_error, read, validate
from jaxdist.config.document import Key
from jaxdist.config.schema import FilePath
from jaxdist.data import DataConfig
from jaxdist.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    MeshError,
    RunError,
    ShardingError,
)
from jaxdist.experimental.onebit import OnebitAdamConfig
from jaxdist.experimental.onebit_lamb import OnebitLambConfig
from jaxdist.heartbeat.config import ElasticConfig
from jaxdist.mesh import MeshConfig
from jaxdist.metrics.energy.config import EnergyConfig
from jaxdist.metrics.trackers.config import MetricsConfig
from jaxdist.models.build import ModelConfig
from jaxdist.models.loss import LossConfig
from jaxdist.optim.build import OptimConfig
from jaxdist.parallel.plan import ParallelConfig
from jaxdist.runtime.notices import PreemptionConfig
from jaxdist.sharding import ShardingConfig
from jaxdist.train.plan import TrainConfig
from jaxdist.train.strategy.config import StrategyConfig, Synchronous
from jaxdist.types import Kwargs

At = Callable[..., AbstractContextManager[None]]
"""A function from a setting to a context manager, which reports errors at this setting."""


AnyOptimConfig = Annotated[
    OptimConfig | OnebitAdamConfig | OnebitLambConfig, Field(discriminator="type")
]
"""The union of all optimizers, including the experimental optimizers."""


class EvalConfig(Config):
    """The interval and the size of evaluations on the held-out split."""

    every: Count | None = None
    """The number of steps between two evaluations; null evaluates only after the last step."""
    batches: Count | None = None
    """The number of batches of the held-out split to use, from its beginning; null uses the
    complete split."""


class HookConfig(Config):
    """A user's hook: a subclass of `jaxdist.Hook`, or a function that returns an instance."""

    type: Literal["import"] = "import"
    """The name that selects a hook of your own in a config."""
    path: str
    """The import path of the class or function, `mypkg.module:Name`."""
    args: Kwargs = Field(default_factory=dict)
    """The keyword arguments for the class or function, by name."""


class RunConfig(Config):
    """The directory of a run, its hooks, and the sources of its preemption notices."""

    directory: FilePath | None = None
    """The run directory; null means runs/NAME, where NAME is the name of the config file."""
    hooks: tuple[HookConfig, ...] = ()
    """The hooks that the run calls, in this order."""
    preemption: PreemptionConfig = PreemptionConfig()
    """The sources of a preemption notice, in addition to signals."""


class ExperimentConfig(Config):
    """An experiment: model, data, mesh, and training."""

    model: ModelConfig
    """The model to train, selected by its `type`."""
    data: DataConfig
    """The data to train and evaluate on, selected by their `type`."""
    loss: LossConfig | None = None
    """The loss to minimize. null takes the model's default loss; an imported model has no default
    loss."""
    optim: AnyOptimConfig
    """The optimizer, selected by its `type`, with the learning rate and its schedule."""
    train: TrainConfig
    """The length of training, the batch size and the number of microbatches."""
    eval: EvalConfig = EvalConfig()
    """The times and the size of evaluations on held-out data."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The times, location and content of checkpoints."""
    elastic: ElasticConfig = ElasticConfig()
    """The settings of elastic runs, whose hosts may join and leave."""
    mesh: MeshConfig = MeshConfig()
    """The arrangement of the devices along named axes."""
    sharding: ShardingConfig = ShardingConfig()
    """The mesh axes of the model's logical dims."""
    parallel: ParallelConfig = ParallelConfig()
    """The communication that jaxdist, rather than XLA, inserts into the step."""
    strategy: StrategyConfig = Synchronous()
    """The method by which the processes of a run train together, such as synchronous steps or
    parameter servers, selected by its `type`."""
    metrics: MetricsConfig = MetricsConfig()
    """The trackers that receive the run's numbers."""
    energy: EnergyConfig = EnergyConfig()
    """The meter of energy, and the carbon intensity of the electricity."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of parameter initialization, data order and dropout."""
    run: RunConfig = RunConfig()
    """The directory of the run, its hooks, and the sources of preemption notices."""


Source = str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig
"""A config file, the plain values of such a file, or a config that is already validated."""


def load(source: Source, overrides: Sequence[str] = ()) -> tuple[Document, ExperimentConfig]:
    """Read and validate a configuration, and return its document and the config.

    Plain values may contain a class or a function instead of its import path, as in `{"type":
    "import", "path": MyModel}`. Such an object must be importable by its name, which is written to
    the config in the run directory.

    Args:
      source: a file, the plain values of such a file, or a validated config.
      overrides: the texts `section.key=value`, which override the source.

    Raises:
      ConfigError: the file or an override has problems, all of which the message lists.
    """
    if isinstance(source, ExperimentConfig):
        source = source.model_dump(mode="json")
    document = read(source, overrides)
    return document, validate(document, ExperimentConfig)


@contextmanager
def at_setting(document: Document, *path: Key) -> Iterator[None]:
    """Report errors inside the block at the setting of the config that causes them."""
    try:
        yield
    except (ConfigError, MeshError, ShardingError, CollectiveError, DataError, RunError) as error:
        found = error if isinstance(error, ConfigError) else ConfigError(str(error))
        all_found = [found, *found.more]
        problems = [Problem((*path, *one.setting), str(one)) for one in all_found]
        raise problems_error(document, problems) from error
    except (MemoryError, OverflowError) as error:
        problem = Problem(path, f"too large for this machine ({error}): use a smaller value")
        raise problems_error(document, [problem]) from error
