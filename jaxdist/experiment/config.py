"""The whole of a configuration, and where in it something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from pydantic import Field

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import Config, Count, Document, Problem, problems_error, read, validate
from jaxdist.config.importing import user_code
from jaxdist.config.schema import FilePath
from jaxdist.data import DataConfig
from jaxdist.elastic.config import ElasticConfig
from jaxdist.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    MeshError,
    RunError,
    ShardingError,
)
from jaxdist.mesh import MeshConfig
from jaxdist.metrics.energy.config import EnergyConfig
from jaxdist.models.build import ModelConfig
from jaxdist.models.loss import LossConfig
from jaxdist.optim.build import OptimConfig
from jaxdist.parallel.plan import ParallelConfig
from jaxdist.runtime.notices import PreemptionConfig
from jaxdist.sharding import ShardingConfig
from jaxdist.train.plan import TrainConfig
from jaxdist.train.strategy.build import StrategyConfig
from jaxdist.train.strategy.synchronous import Synchronous

At = Callable[..., AbstractContextManager[None]]
"""Of the path of a setting: where what goes wrong is reported there."""


class EvalConfig(Config):
    """How often and on how much of the held-out split to evaluate."""

    every: Count | None = None
    """Steps between two evaluations; null evaluates after the last step only."""
    batches: Count | None = None
    """Batches of the held-out split to use, from its beginning; null uses all of it."""


class RunConfig(Config):
    """Where a run keeps its files, and what stops it early."""

    directory: FilePath | None = None
    """The run directory; null is runs/ and the name of the config file."""
    preemption: PreemptionConfig = PreemptionConfig()
    """Who tells, besides signals, that the machine will be taken away."""


class ExperimentConfig(Config):
    """One experiment: model, data, mesh, and how to train."""

    model: ModelConfig
    """The model, by type."""
    data: DataConfig
    """The data, by type."""
    loss: LossConfig | None = None
    """What is minimised; null is the model's own (required for an imported model)."""
    optim: OptimConfig
    """The optimizer, by type."""
    train: TrainConfig
    """Length and batch size."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    elastic: ElasticConfig = ElasticConfig()
    """Hosts that come and go."""
    mesh: MeshConfig = MeshConfig()
    """Devices as named axes."""
    sharding: ShardingConfig = ShardingConfig()
    """Logical dims onto mesh axes."""
    parallel: ParallelConfig = ParallelConfig()
    """What is communicated explicitly."""
    strategy: StrategyConfig = Synchronous()
    """How the run is made of steps and processes, by type."""
    energy: EnergyConfig = EnergyConfig()
    """How energy is measured, and its carbon."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of parameters, data order and random layers."""
    run: RunConfig = RunConfig()
    """Files."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> tuple[Document, ExperimentConfig]:
    """Read and validate a configuration file.

    Raises:
      ConfigError: all problems of the file and of the overrides at once.
    """
    document = read(path, overrides)
    return document, validate(document, ExperimentConfig)


@contextmanager
def at_setting(document: Document, *path: str) -> Iterator[None]:
    """What a user can mend is reported at its place in the config."""
    try:
        yield
    except (ConfigError, MeshError, ShardingError, CollectiveError, DataError, RunError) as error:
        blamed = (*path, *error.setting) if isinstance(error, ConfigError) else path
        raise problems_error(document, [Problem(blamed, str(error))]) from error
    except (MemoryError, OverflowError) as error:
        problem = Problem(path, f"too large for this machine: {error}")
        raise problems_error(document, [problem]) from error


@contextmanager
def own_code(*names: str, **parts: Config | None) -> Iterator[bool]:
    """Where code of the user's may run: whether any of the named parts is; its errors are told."""
    paths = {name: getattr(parts[name], "path", None) for name in names}
    imported = " or ".join(f"{name}.path {path}" for name, path in paths.items() if path)
    with user_code(imported) if imported else nullcontext():
        yield bool(imported)
