"""The program of a configuration: model, loss, optimizer and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.data import Dataset
from jaxdist.data.loader import WEIGHT
from jaxdist.experiment.compression import explain_messages, with_compression
from jaxdist.experiment.config import At, ExperimentConfig, own_code
from jaxdist.experiment.facts import model_facts
from jaxdist.experiment.part import trained_part
from jaxdist.experiment.rows import check_rows
from jaxdist.experiment.strategies import check_strategy
from jaxdist.models.build import choose_loss, make_model, model_notices
from jaxdist.models.functional import Functional, functional
from jaxdist.models.hints import no_hint
from jaxdist.models.loss import Loss, MaskedTokensConfig, NextTokenConfig, weighted
from jaxdist.models.mean import scalars_in
from jaxdist.optim.build import Optimizer, Rate, build_optimizer
from jaxdist.optim.common import NamedParams
from jaxdist.parallel.compiler import compiler_options
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.exchange.strict import Strict
from jaxdist.parallel.objective import Objective, measures
from jaxdist.parallel.pipeline.model.parted import plan_parted
from jaxdist.parallel.pipeline.model.pipeline import Pipeline, plan_pipeline
from jaxdist.parallel.pipeline.planning.plan import ChunkPlan, plan_chunks, stages_of
from jaxdist.parallel.plan import plan_exchange
from jaxdist.parallel.strict.check import check_update
from jaxdist.sharding import Dims, Layout, param_shardings, resolve_dims
from jaxdist.train.assemble import assemble
from jaxdist.train.evaluate import why_in_parts
from jaxdist.train.offload import check_host_memory
from jaxdist.train.plan import TrainPlan
from jaxdist.train.step import Program
from jaxdist.train.strategy.config import Hybrid, ParameterServer
from jaxdist.train.strategy.contract import RunSettings
from jaxdist.trees import flatten_with_names
from jaxdist.validity.features import Facts
from jaxdist.validity.optimizer import optimizer_notices as notices_of_optimizer
from jaxdist.validity.table import check

Own = Callable[..., AbstractContextManager[bool]]
"""The type of `own_code` with the sections of a config: its arguments are the names of sections,
and its context yields whether one of these sections has user code."""


def make_program(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    plan: TrainPlan,
    rate: Rate,
    at: At,
    traced: bool = True,
) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """Return the program, lines that explain its choices, and notices of settings without effect.

    Args:
      batch: the shape, dtype and sharding of each field of a global batch.
      plan: the train stages of the run.
      rate: the learning rate of the run.
      at: a function from a setting to a context manager; errors in the context are reported at that
        setting.
      traced: whether to trace the step, so that its errors are raised here.

    Raises:
      ConfigError: a part cannot be built, or parts do not fit together.
    """
    own = partial(own_code, model=config.model, loss=config.loss, optim=config.optim)
    model, dims, loss = _what_is_trained(config, layout, dataset, batch, at, own)
    with at("parallel", "pipeline"), own("loss", "model"):
        chunks = chunks_of(config, model, loss, batch, stages_of(layout.mesh))
    stored = layout if chunks is None else chunks.stored(layout)
    with at("sharding"):
        whole = param_shardings(stored, model.params, dims)
    # The model's facts are known only now, so the table of valid combinations is checked again.
    facts = model_facts(config, layout, dims, model)
    with at():
        check(facts)
    with at("parallel"):
        given = config.parallel, layout, model.params, dims, whole, model.stacked
        more = {"seed": config.seed, "whole_matrices": config.optim.whole_matrices}
        more |= {"offloads": facts.offloads, "frozen": model.frozen}
        exchange, notices = plan_exchange(*given, **more)
        check_host_memory(exchange.zero)
    with at("parallel"), own("loss", "model") as imported:
        # Built-in models keep rows independent, so only a user's model needs a trace.
        if imported:
            local = config.parallel.batch_norm == "local"
            objective, pieces = Objective(model, loss), config.train.microbatches
            more = check_rows(objective, batch, exchange, local=local, microbatches=pieces)
            notices = (*notices, *more)
    masks = "answer" in batch
    if config.loss is not None and config.loss.type == "import":
        with at("loss"), own("loss", "model"):
            sums, masks = measures(Objective(model, loss), batch)
        with at():
            check(_loss_facts(facts, config, dataset, scalars_in(sums), layout, batch))
    with at("parallel", "xla"):
        options = compiler_options(config.parallel.xla, list(layout.mesh.local_devices))
    optim = with_compression(config.optim, config.parallel.compression)
    with at("optim"), own("optim"):
        optimizer = build_optimizer(
            optim, total_steps=plan.total_steps, params=model.trained, dims=dims, rate=rate
        )
        of_rule = optim.explain(NamedParams(model.trained, dims))
    if config.parallel.deterministic is not None and exchange.zero is not None:
        with at("optim"), own("optim"):
            check_update(optimizer.transform, jax.eval_shape(optimizer.stored, model.trained))
    with at():
        averages = optimizer.eval_params is not None
        check(replace(facts, optim=replace(facts.optim, averages=averages)))
        of_strategy = _checked(config, layout, model, dims, plan, optimizer)
    with at("parallel", "pipeline"), own("loss", "model"):
        pipeline = chunks and _pipeline(config, chunks, model, loss, stored, dims, batch)
    # Parameter servers skip no step, because a push without weight has no effect on them.
    skips = (masks or WEIGHT in batch) and not isinstance(config.strategy, ParameterServer)
    with at("loss"):
        program = assemble(
            model, loss, optimizer, stored, dims, batch,
            seed=config.seed, microbatches=config.train.microbatches,
            exchange=exchange, pipeline=pipeline, outer=config.strategy.outer(), options=options,
            skips_empty=skips,
        )  # fmt: skip
        with own("loss", "model"):
            # `metrics` traces the loss here, so that its errors are reported at the setting `loss`.
            _ = program.metrics
    # The trace comes first, because it explains errors of the user's code, which the functions of
    # the notices below call too.
    if traced:
        _trace(config, program, at)
    of_model = model_notices(config.model, _shapes(batch))
    of_optimizer = notices_of_optimizer(config.optim, optimizer, model.trained)
    of_chunks = () if chunks is None else chunks.notices(stored, model, dims)
    explained = (*of_rule, *_explained(config, exchange))
    explained = explained if chunks is None else (*chunks.explained, *explained)
    return program, explained, (*of_model, *of_optimizer, *notices, *of_strategy, *of_chunks)


def _loss_facts(
    facts: Facts,
    config: ExperimentConfig,
    dataset: Dataset,
    scalars: tuple[str, ...],
    layout: Layout,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> Facts:
    """Return a copy of `facts` with added facts about the loss.

    The added facts are the loss's scalars, whether examples have weights, and, for a loss with
    scalars, the reason why the held-out split cannot be evaluated as a single batch.

    Args:
      scalars: the names of the values that the loss returns as scalars.
    """
    evaluation = None
    if scalars and dataset.heldout is not None:
        size = config.train.batch_size
        given = len(dataset.heldout), config.eval.batches, size, layout.data_size
        evaluation = why_in_parts(*given)
    return replace(facts, scalars=scalars, weighted=WEIGHT in batch, evaluation=evaluation)


def _checked(
    config: ExperimentConfig,
    layout: Layout,
    model: Functional,
    dims: Mapping[str, Dims],
    plan: TrainPlan,
    optimizer: Optimizer,
) -> tuple[str, ...]:
    """Check the strategy against the rest of the config, and return notices."""
    given = RunSettings(
        total_steps=plan.total_steps,
        train=config.train,
        optim=config.optim,
        layout=layout,
        optimizer=optimizer,
        params=model.trained,
        dims=dims,
    )
    return check_strategy(config.strategy, given)


def _what_is_trained(
    config: ExperimentConfig,
    layout: Layout,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    at: At,
    own: Own,
) -> tuple[Functional, Mapping[str, Dims], Loss]:
    """Return the model, the logical dims of its parameters by name, and the loss.

    The stacks of layers in the model are detected, and its trained parameters are selected.
    """
    with at("model"):
        model = build_model(config, dataset, batch, layout)
    with at("loss"):
        loss = loss_of(config, batch, layout)
    with at("loss"), own("loss", "model") as imported:
        # Built-in models mark their stacks of layers, and a trace finds the stacks of user models.
        # A model of dissimilar parts is traced part by part later.
        if imported and not model.in_parts:
            rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
            model = model.with_stacks(lambda module, rows: loss(module, weighted(rows)), rows)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    with at("sharding"):
        dims = resolve_dims(config.sharding, shapes, model.dims, model.stacked, layout)
    with at("model"):
        model = trained_part(config.model, model.with_dims(dims))
        return model, {**dims, **{n: d for n, d in model.dims.items() if d is not None}}, loss


def build_model(
    config: ExperimentConfig,
    dataset: Dataset,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    layout: Layout | None = None,
) -> Functional:
    """Build the model for batches of the given shapes.

    Args:
      batch: the shape and dtype of each field of a batch.
      layout: the layout of the model's activations, or None without constraints.

    Raises:
      ConfigError: the model does not fit the data or the devices.
    """
    make = make_model(
        config.model,
        shapes=_shapes(batch),
        vocab_size=dataset.vocab_size,
        classes=dataset.classes,
        hint=no_hint if layout is None else layout,
        # The device is one of the mesh, since a program may be compiled for devices that are not
        # present.
        device=None if layout is None else layout.mesh.local_devices[0],
        fields=dataset.fields,
        served=isinstance(config.strategy, Hybrid),
    )
    return functional(make)


def loss_of(
    config: ExperimentConfig,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    layout: Layout | None = None,
) -> Loss:
    """Return the loss to minimize: the loss of the config, or else the model's default loss.

    Args:
      layout: the layout of the model's activations, or None without constraints.

    Raises:
      ConfigError: the loss does not fit the model or the data.
    """
    found = choose_loss(config.model, config.loss, _shapes(batch))
    if isinstance(found, NextTokenConfig | MaskedTokensConfig) and layout is not None:
        return found.build(layout)
    return found.build()


def _shapes(batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each field of an example, by name."""
    return {name: struct.shape[1:] for name, struct in batch.items()}


def chunks_of(
    config: ExperimentConfig,
    model: Functional,
    loss: Loss,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    stages: int,
) -> ChunkPlan | None:
    """Plan the chunks of a pipeline of `stages` stages, or return None for a single stage.

    Raises:
      ConfigError: the model or the schedule does not fit the stages.
    """
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


def _explained(config: ExperimentConfig, exchange: Exchange) -> tuple[str, ...]:
    found = tuple(explain_messages(config.parallel.compression, exchange))
    return (*found, exchange.explain()) if isinstance(exchange, Strict) else found


def _trace(config: ExperimentConfig, program: Program, at: At) -> None:
    """Trace the parts of a program that may raise errors, to find the errors before compilation."""
    own = partial(own_code, model=config.model, loss=config.loss, optim=config.optim)
    if program.exchange.explicit:
        with at("parallel", "reduce"):
            program.train.trace(program.state_shapes, program.batch)
    # Built-in parts can always be traced, so only the user's code is traced a second time.
    with at("optim"), own("optim") as imported:
        if imported:
            own_state, number = program.own_shapes, jax.ShapeDtypeStruct((), jnp.float32)
            trained = program.model.divided(own_state.params)[0]
            given = (trained, own_state.opt_state, trained)
            jax.eval_shape(program.optimizer.update, *given, grad_norm=number, value=number)
            _ = program.state_shapes
            jax.eval_shape(program.evaluated, program.state_shapes)
    with at("train"), own("optim", "loss", "model") as imported:
        if imported:
            program.train.trace(program.state_shapes, program.batch)
