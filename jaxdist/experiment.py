"""The whole of a configuration, its cross-checks, and what it builds.

Only this module sees the whole tree; nothing below it ever receives more than its own section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxdist.checkpoint.store import CheckpointConfig
from jaxdist.config import Config, Count, Document, Problem, problems_error, read, validate
from jaxdist.config.importing import user_code
from jaxdist.data import DataConfig, Dataset
from jaxdist.data.loader import Loader
from jaxdist.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    JaxdistError,
    MeshError,
    RunError,
    ShardingError,
)
from jaxdist.mesh import Device, MeshConfig, build_mesh
from jaxdist.models.build import ModelConfig, choose_loss, make_model, offloads_of
from jaxdist.models.functional import Functional, functional
from jaxdist.models.layers import no_hint
from jaxdist.models.loss import Loss, LossConfig, weighted
from jaxdist.optim.build import OptimConfig, Rate, build_optimizer
from jaxdist.parallel.compiler import compiler_options
from jaxdist.parallel.pipeline.model.parted import plan_parted
from jaxdist.parallel.pipeline.model.pipeline import Pipeline, plan_pipeline
from jaxdist.parallel.pipeline.planning.plan import ChunkPlan, plan_chunks, stages_of
from jaxdist.parallel.plan import ParallelConfig, plan_exchange
from jaxdist.sharding import (
    Dims,
    Layout,
    ShardingConfig,
    make_layout,
    param_shardings,
    resolve_dims,
)
from jaxdist.train.assemble import assemble
from jaxdist.train.plan import (
    Plan,
    TrainConfig,
    check_batch,
    explain,
    needs_examples,
    plan_learning_rate,
    plan_stages,
)
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names

At = Callable[..., AbstractContextManager[None]]
"""Of the path of a setting: where what goes wrong is reported there."""


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
class Experiment:
    """A built experiment: everything is checked, nothing is computed yet.

    Attributes:
      program: the step and the evaluation at train.batch_size, and the state of every stage.
      loader: training batches of train.batch_size.
      stages: what a run goes through; for most runs one, with `program` and `loader`.
      explained: how derived values came about, a line each.
      notices: settings that do nothing here, a sentence each.
    """

    config: ExperimentConfig
    dataset: Dataset
    layout: Layout
    program: Program
    loader: Loader
    heldout: Loader | None
    total_steps: int
    stages: tuple[TrainStage, ...]
    explained: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What the rate counts: "tokens" or "examples"."""
        return "tokens" if "tokens" in self.program.batch else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens trained on, or examples, in one step at train.batch_size."""
        return self.config.train.batch_size * self.units_per_example

    @property
    def units_per_example(self) -> int:
        """Tokens of an example, or 1."""
        return self.program.batch["tokens"].shape[1] - 1 if self.unit == "tokens" else 1


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
    at = partial(_at, document or Document(config.model_dump(mode="json")))
    with at("mesh"):
        layout = make_layout(config.sharding, build_mesh(config.mesh, devices))
    with at("train", "batch_size"):
        check_batch(config.train.batch_size, config.train.microbatches, layout)
    with at("data"):
        dataset = config.data.build()
    with at("data"):
        loader = _loader(config, layout, dataset)
        heldout = (
            None if dataset.heldout is None else _loader(config, layout, dataset, heldout=True)
        )
    with at("train"):
        plan = plan_stages(config.train, len(dataset.train))
    with at("optim"):
        rate = plan_learning_rate(config.train, config.optim, plan, len(dataset.train))
    program, derived, notices = _program(
        config, layout, dataset, loader.batch_shapes, plan, rate, at
    )
    with at("train"):
        stages = _stages(config, layout, dataset, plan, program, loader)
    return Experiment(
        config=config,
        dataset=dataset,
        layout=layout,
        program=program,
        loader=loader,
        heldout=heldout,
        total_steps=plan.total_steps,
        stages=stages,
        explained=(*explain(plan, rate), *derived),
        notices=notices,
    )


def explain_config(config: ExperimentConfig, document: Document | None = None) -> tuple[str, ...]:
    """What the run of a config derives, a line each; nothing where all is as the config says.

    The data is read for its size where that is quick.

    Raises:
      ConfigError: values that do not go together.
    """
    at = partial(_at, document or Document(config.model_dump(mode="json")))
    return (*_explain_steps(config, at), *_explain_pipeline(config, at))


def _explain_steps(config: ExperimentConfig, at: At) -> tuple[str, ...]:
    train, optim, examples = config.train, config.optim, None
    if needs_examples(train, optim):
        if optim.scale_from is None and train.batch_ramp is None and train.phases is None:
            return ()
        data = _at_hand(config.data)
        if data is None:
            return ("learning rate, warm-up and stages: unknown until the data is read",)
        examples = len(data.train)
    with at("train"):
        plan = plan_stages(train, examples)
    with at("optim"):
        return explain(plan, plan_learning_rate(train, optim, plan, examples))


def _explain_pipeline(config: ExperimentConfig, at: At) -> tuple[str, ...]:
    stages, rows = config.mesh.stage, config.train.batch_size
    if not isinstance(stages, int) or stages < 2:
        return ()
    data = _at_hand(config.data)
    if data is None or "import" in (config.model.type, config.loss and config.loss.type):
        return ("pipeline: unknown until the data and the model are read",)
    batch = {
        name: jax.ShapeDtypeStruct((rows, *jnp.shape(value)), jnp.result_type(value))
        for name, value in data.train[0].items()
    }
    with at("model"):
        model = _model(config, data, batch)
    with at("loss"):
        loss = _loss(config, batch)
    with at("parallel", "pipeline"):
        chunks = _chunks(config, model, loss, batch, stages)
    return () if chunks is None else chunks.explained


def _at_hand(data: DataConfig) -> Dataset | None:
    """The data where no download, large file or user's code stands before."""
    quick = data.type == "synthetic" or getattr(data, "source", "") in ("digits", "python-stdlib")
    try:
        return data.build() if quick else None
    except JaxdistError:
        return None


def _stages(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    plan: Plan,
    program: Program,
    loader: Loader,
) -> tuple[TrainStage, ...]:
    """A program and a loader for each stage; those of one batch size share the program."""
    train = config.train
    programs = {train.batch_size: program}
    stages = []
    for stage, seen in zip(plan.stages, plan.first_examples, strict=True):
        size, batches = stage.batch_size, loader
        compute = program.compute.resized(train.microbatches_of(size))
        check_batch(size, compute.microbatches, layout)
        if seen or size != train.batch_size:
            batches = _loader(config, layout, dataset, batch_size=size, start_example=seen)
        if size not in programs:
            programs[size] = replace(program, batch=batches.batch_shapes, compute=compute)
        last = stage.first_step + stage.steps
        stages.append(TrainStage(stage.first_step, last, size, programs[size], batches))
    return tuple(stages)


def _loader(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    *,
    heldout: bool = False,
    batch_size: int | None = None,
    start_example: int = 0,
) -> Loader:
    def sharding(name: str, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        return layout.sharding(("batch", *(None,) * (len(shape) - 1)))

    source = dataset.heldout if heldout else dataset.train
    assert source is not None
    return Loader(
        source,
        batch_size=batch_size or config.train.batch_size,
        seed=config.seed,
        shuffle=not heldout,
        start_example=start_example,
        sharding=sharding,
        prefetch=config.train.prefetch,
        allowed=dataset.allowed,
        split="held-out split" if heldout else "training split",
    )


def _program(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    plan: Plan,
    rate: Rate,
    at: At,
) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """The program, how its pipeline came about, and settings of its plan that do nothing."""
    own = partial(_own, model=config.model, loss=config.loss, optim=config.optim)
    with at("model"):
        model = _model(config, dataset, batch, layout)
    with at("loss"):
        loss = _loss(config, batch)
    with at("loss"), own("loss", "model") as imported:
        # Built-in models mark their stacks; a model of unlike parts is traced part by part.
        if imported and not model.in_parts:
            rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
            model = model.with_stacks(lambda module, rows: loss(module, weighted(rows)), rows)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    with at("sharding"):
        dims = resolve_dims(config.sharding, shapes, model.dims, model.stacked)
        model = model.with_dims(dims)
    with at("parallel", "pipeline"), own("loss", "model"):
        chunks = _chunks(config, model, loss, batch, stages_of(layout.mesh))
    stored = layout if chunks is None else chunks.stored(layout)
    with at("sharding"):
        whole = param_shardings(stored, model.params, dims)
    with at("parallel"):
        given = (config.parallel, layout, model.params, dims, whole, model.stacked)
        exchange, notices = plan_exchange(*given, offloads=offloads_of(config.model))
    with at("parallel", "xla"):
        options = compiler_options(config.parallel.xla, list(layout.mesh.local_devices))
    with at("optim"), own("optim"):
        optimizer = build_optimizer(
            config.optim, total_steps=plan.total_steps, params=model.params, dims=dims, rate=rate
        )
    with at("parallel", "pipeline"), own("loss", "model"):
        pipeline = None
        if chunks is not None:
            pipeline = _pipeline(config, chunks, model, loss, stored, dims, batch)
    with at("loss"):
        program = assemble(
            model,
            loss,
            optimizer,
            stored,
            dims,
            batch,
            seed=config.seed,
            microbatches=config.train.microbatches,
            exchange=exchange,
            pipeline=pipeline,
            options=options,
        )
        with own("loss", "model"):
            _ = program.metrics
    _trace(program, at, own)
    if chunks is None:
        return program, (), notices
    return program, chunks.explained, (*notices, *chunks.notices(stored, model, dims))


def _model(
    config: ExperimentConfig,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    layout: Layout | None = None,
) -> Functional:
    make = make_model(
        config.model,
        shapes=_shapes(batch),
        vocab_size=dataset.vocab_size,
        classes=dataset.classes,
        hint=no_hint if layout is None else layout,
        # Not this process's own: programs are compiled for devices that are not there.
        device=None if layout is None else layout.mesh.local_devices[0],
    )
    return functional(make)


def _loss(config: ExperimentConfig, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Loss:
    return choose_loss(config.model, config.loss, _shapes(batch)).build()


def _shapes(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[int, ...]]:
    """Of one example, by field."""
    return {name: struct.shape[1:] for name, struct in batch.items()}


def _chunks(
    config: ExperimentConfig,
    model: Functional,
    loss: Loss,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    stages: int,
) -> ChunkPlan | None:
    microbatches = config.train.microbatches
    return plan_chunks(
        config.parallel.pipeline, model, loss, batch, stages=stages, microbatches=microbatches
    )


def _pipeline(
    config: ExperimentConfig,
    chunks: ChunkPlan,
    model: Functional,
    loss: Loss,
    layout: Layout,
    dims: Mapping[str, Dims],
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> Pipeline:
    given = (config.parallel.pipeline, chunks, model, loss, layout, dims)
    return plan_parted(*given, batch) if chunks.parted else plan_pipeline(*given)


def _trace(
    program: Program,
    at: At,
    own: Callable[..., AbstractContextManager[bool]],
) -> None:
    """Trace what may fail, so that the config's author hears of it before anything is compiled."""
    if program.exchange.explicit:
        with at("parallel", "reduce"):
            jax.eval_shape(program.train, program.state_shapes, program.batch)
    # Built-in parts are known to trace, so that only the user's cost a second tracing.
    with at("optim"), own("optim") as imported:
        if imported:
            own_state, number = program.own_shapes, jax.ShapeDtypeStruct((), jnp.float32)
            given = (own_state.params, own_state.opt_state, own_state.params)
            jax.eval_shape(program.optimizer.update, *given, grad_norm=number, value=number)
            _ = program.state_shapes
    with at("train"), own("optim", "loss", "model") as imported:
        if imported:
            jax.eval_shape(program.train, program.state_shapes, program.batch)


@contextmanager
def _own(*names: str, **parts: Config | None) -> Iterator[bool]:
    """Where code of the user's may run: whether any of the named parts is; its errors are told."""
    paths = {name: getattr(parts[name], "path", None) for name in names}
    imported = " or ".join(f"{name}.path {path}" for name, path in paths.items() if path)
    with user_code(imported) if imported else nullcontext():
        yield bool(imported)
