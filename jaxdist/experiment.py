"""The whole of a configuration, its cross-checks, and what it builds.

Only this module sees the whole tree; nothing below it ever receives more than its own section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
from pydantic import Field, model_validator

from jaxdist.checkpoint.store import CheckpointConfig
from jaxdist.config import Config, Count, Document, Problem, problems_error, read, validate
from jaxdist.config.importing import user_code
from jaxdist.data import DataConfig, Dataset, Source
from jaxdist.data.loader import Loader
from jaxdist.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    MeshError,
    RunError,
    ShardingError,
)
from jaxdist.mesh import Device, MeshConfig, build_mesh
from jaxdist.models.build import ModelConfig, default_loss, make_model
from jaxdist.models.functional import functional
from jaxdist.models.loss import LossConfig
from jaxdist.optim.build import OptimConfig, build_optimizer
from jaxdist.parallel.plan import ParallelConfig, plan_data_parallel
from jaxdist.sharding import Layout, ShardingConfig, make_layout, param_shardings, resolve_dims
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names


class TrainConfig(Config):
    """How long to train, on how much at once."""

    steps: Count | None = None
    """Optimizer steps; give either steps or epochs."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training split, rounded to whole steps."""
    batch_size: Count
    """Examples (windows, images) per optimizer step, over all devices and microbatches."""
    microbatches: Count = 1
    """Pieces that a batch is computed in, one after another, to save memory."""
    log_every: Count = 10
    """Steps between two lines of metrics."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Batches that wait on the devices beside the one in use."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self

    def total_steps(self, examples: int) -> int:
        """Optimizer steps for a training split of this many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))


class EvalConfig(Config):
    """How often and on how much of the held-out split to evaluate."""

    every: Count | None = None
    """Steps between two evaluations; null evaluates after the last step only."""
    batches: Count | None = None
    """Batches of the held-out split to use, from its beginning; null uses all of it."""


class RunConfig(Config):
    """Where a run keeps its files."""

    directory: Path | None = None
    """The run directory; null is runs/ and the name of the config file."""


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
    mesh: MeshConfig = MeshConfig()
    """Devices as named axes."""
    sharding: ShardingConfig = ShardingConfig()
    """Logical dims onto mesh axes."""
    parallel: ParallelConfig = ParallelConfig()
    """What is communicated explicitly."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of parameters, data order and random layers."""
    run: RunConfig = RunConfig()
    """Files."""


@dataclass(frozen=True)
class Experiment:
    """A built experiment: everything is checked, nothing is computed yet."""

    config: ExperimentConfig
    dataset: Dataset
    layout: Layout
    program: Program
    loader: Loader
    heldout: Loader | None
    total_steps: int

    @property
    def unit(self) -> str:
        """What the rate counts: "tokens" or "examples"."""
        return "tokens" if "tokens" in self.program.batch else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens trained on, or examples, in one step."""
        window = self.program.batch["tokens"].shape[1] - 1 if self.unit == "tokens" else 1
        return self.config.train.batch_size * window


@contextmanager
def _at(document: Document, *path: str) -> Iterator[None]:
    """What a user can mend is reported at its place in the config."""
    try:
        yield
    except (ConfigError, MeshError, ShardingError, CollectiveError, DataError, RunError) as error:
        raise problems_error(document, [Problem(path, str(error))]) from error
    except (MemoryError, OverflowError) as error:
        problem = Problem(path, f"too large for this machine: {error}")
        raise problems_error(document, [problem]) from error


def load(path: Path | str, overrides: Sequence[str] = ()) -> tuple[Document, ExperimentConfig]:
    """Read and validate a configuration file.

    Raises:
      ConfigError: all problems of the file and of the overrides at once.
    """
    document = read(path, overrides)
    return document, validate(document, ExperimentConfig)


def check_batch(config: TrainConfig, layout: Layout) -> None:
    """The batch must divide over microbatches and over the devices that split it.

    Raises:
      ConfigError: it does not; the message gives the nearest sizes that do.
    """
    parts = layout.data_size * config.microbatches
    if config.batch_size % parts:
        below = config.batch_size // parts * parts
        fitting = " or ".join(str(size) for size in (below, below + parts) if size)
        raise ConfigError(
            f"a batch of {config.batch_size} does not divide over {layout.data_size} devices along "
            f"data x {config.microbatches} microbatches = {parts} parts; use {fitting}"
        )


def build(
    config: ExperimentConfig,
    document: Document | None = None,
    *,
    devices: Sequence[Device] | None = None,
) -> Experiment:
    """Build everything that a config names, on all devices or on those given.

    Raises:
      ConfigError: a part that cannot be built, or parts that do not go together.
    """
    at = partial(_at, document or Document({}))
    with at("mesh"):
        layout = make_layout(config.sharding, build_mesh(config.mesh, devices))
    with at("train", "batch_size"):
        check_batch(config.train, layout)
    with at("data"):
        dataset = config.data.build()
    with at("data"):
        loader = _loader(config, layout, dataset.train, shuffle=True)
        heldout = None
        if dataset.heldout is not None:
            heldout = _loader(config, layout, dataset.heldout, shuffle=False)
    total_steps = config.train.total_steps(len(dataset.train))
    program = _program(config, layout, dataset, loader.batch_shapes, total_steps, at)
    return Experiment(config, dataset, layout, program, loader, heldout, total_steps)


def _loader(config: ExperimentConfig, layout: Layout, source: Source, *, shuffle: bool) -> Loader:
    def sharding(name: str, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        return layout.sharding(("batch", *(None,) * (len(shape) - 1)))

    return Loader(
        source,
        batch_size=config.train.batch_size,
        seed=config.seed,
        shuffle=shuffle,
        sharding=sharding,
        prefetch=config.train.prefetch,
    )


def _program(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    total_steps: int,
    at: Callable[..., AbstractContextManager[None]],
) -> Program:
    with at("model"):
        make = make_model(
            config.model,
            shapes={name: struct.shape[1:] for name, struct in batch.items()},
            vocab_size=dataset.vocab_size,
            classes=dataset.classes,
            hint=layout,
        )
        model = functional(make)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    with at("sharding"):
        dims = resolve_dims(config.sharding, shapes, model.dims)
        param_shardings(layout, model.params, dims)
    with at("parallel"):
        data_parallel = plan_data_parallel(config.parallel, layout, dims)
    own = partial(_own, model=config.model, loss=config.loss, optim=config.optim)
    with at("optim"), own("optim"):
        optimizer = build_optimizer(
            config.optim, total_steps=total_steps, params=model.params, dims=dims
        )
    loss = config.loss or default_loss(config.model)
    with at("loss"):
        if loss is None:
            raise ConfigError("an imported model needs a loss, e.g. {type: next_token}")
        program = Program(
            model=model,
            loss=loss.build(),
            optimizer=optimizer,
            layout=layout,
            dims=dims,
            batch=batch,
            seed=config.seed,
            microbatches=config.train.microbatches,
            data_parallel=data_parallel,
        )
        with own("loss", "model"):
            _ = program.metrics
    if data_parallel is not None:
        with at("parallel", "reduce"):
            jax.eval_shape(program.train, program.state_shapes, program.batch)
    # Built-in parts are known to trace, so that only the user's cost a second tracing.
    with at("optim"), own("optim") as imported:
        if imported:
            _ = program.state_shapes
    with at("train"), own("optim", "loss", "model") as imported:
        if imported:
            jax.eval_shape(program.train, program.state_shapes, program.batch)
    return program


@contextmanager
def _own(*names: str, **parts: Config | None) -> Iterator[bool]:
    """Where code of the user's may run: whether any of the named parts is; its errors are told."""
    paths = {name: getattr(parts[name], "path", None) for name in names}
    imported = " or ".join(f"{name}.path {path}" for name, path in paths.items() if path)
    with user_code(imported) if imported else nullcontext():
        yield bool(imported)
