"""The program of a configuration: model, loss, optimizer and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxdist.config.importing import user_code
from jaxdist.data import Dataset
from jaxdist.data.loader import WEIGHT
from jaxdist.experiment.compression import explain_exchange, with_compression
from jaxdist.experiment.config import At, ExperimentConfig
from jaxdist.experiment.facts import model_facts
from jaxdist.experiment.part import trained_part
from jaxdist.experiment.rows import check_rows
from jaxdist.experiment.strategies import check_strategy
from jaxdist.models.build import choose_loss, make_model, model_notices
from jaxdist.models.functional import Functional, functional
from jaxdist.models.hints import no_hint
from jaxdist.models.loss import Loss, MaskedTokensConfig, NextTokenConfig, weighted
from jaxdist.models.mean import scalars_in
from jaxdist.optim.build import Rate, build_optimizer
from jaxdist.optim.common import NamedParams
from jaxdist.parallel.compiler import compiler_options
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.objective import Objective, measures
from jaxdist.parallel.pipeline.model.parted import plan_parted
from jaxdist.parallel.pipeline.model.pipeline import plan_pipeline
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
from jaxdist.types import Shardings
from jaxdist.validity.features import Facts
from jaxdist.validity.optimizer import optimizer_notices as notices_of_optimizer
from jaxdist.validity.table import check


@dataclass(frozen=True)
class ProgramInputs:
    """The config and data from which the parts of a program are built.

    Attributes:
      batch: the shape, dtype and sharding of each field of a global batch.
      layout: the layout of the model's activations, or None without constraints.
      at: a function from a setting to a context manager; errors in the context are reported at that
        setting.
    """

    config: ExperimentConfig
    dataset: Dataset
    batch: Mapping[str, jax.ShapeDtypeStruct]
    layout: Layout | None
    at: At

    @contextmanager
    def own(self, *names: str) -> Iterator[bool]:
        """Return a context manager in which errors are attributed to code that the user imports.

        The value of the context is whether one of the sections `names` of the config imports code.
        """
        paths = {name: getattr(getattr(self.config, name), "path", None) for name in names}
        imported = " or ".join(f"{name}.path {path}" for name, path in paths.items() if path)
        with user_code(imported) if imported else nullcontext():
            yield bool(imported)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of an example, by name."""
        return {name: struct.shape[1:] for name, struct in self.batch.items()}

    def model(self) -> Functional:
        """Build the model for batches of the given shapes.

        Raises:
          ConfigError: the model does not fit the data or the devices.
        """
        layout = self.layout
        make = make_model(
            self.config.model,
            shapes=self.shapes,
            vocab_size=self.dataset.vocab_size,
            classes=self.dataset.classes,
            hint=no_hint if layout is None else layout,
            # The device is one of the mesh, since a program may be compiled for devices that are
            # not present.
            device=None if layout is None else layout.mesh.local_devices[0],
            fields=self.dataset.fields,
            served=isinstance(self.config.strategy, Hybrid),
        )
        return functional(make)

    def loss(self) -> Loss:
        """Return the loss to minimize: the loss of the config, or else the model's default loss.

        Raises:
          ConfigError: the loss does not fit the model or the data.
        """
        found = choose_loss(self.config.model, self.config.loss, self.shapes)
        if isinstance(found, NextTokenConfig | MaskedTokensConfig) and self.layout is not None:
            return found.build(self.layout)
        return found.build()

    def chunks(self, model: Functional, loss: Loss, stages: int) -> ChunkPlan | None:
        """Plan the chunks of a pipeline of `stages` stages, or return None for a single stage.

        Raises:
          ConfigError: the model or the schedule does not fit the stages.
        """
        config, microbatches = self.config.parallel.pipeline, self.config.train.microbatches
        given = config, model, loss, self.batch
        return plan_chunks(*given, stages=stages, microbatches=microbatches)


def make_program(
    given: ProgramInputs, plan: TrainPlan, rate: Rate, *, traced: bool = True
) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """Return the program, lines that explain its choices, and notices of settings without effect.

    Args:
      given: the config and data; the layout must be given.
      plan: the train stages of the run.
      rate: the learning rate of the run.
      traced: whether to trace the step, so that its errors are raised here.

    Raises:
      ConfigError: a part cannot be built, or parts do not fit together.
    """
    config, batch, layout, at, own = given.config, given.batch, given.layout, given.at, given.own
    assert layout is not None
    model, dims, loss = _what_is_trained(given, layout)
    with at("parallel", "pipeline"), own("loss", "model"):
        chunks = given.chunks(model, loss, stages_of(layout.mesh))
    stored = layout if chunks is None else chunks.stored(layout)
    with at("sharding"):
        whole = param_shardings(stored, model.params, dims)
    # The model's facts are known only now, so the table of valid combinations is checked again.
    facts = model_facts(config, layout, dims, model)
    with at():
        check(facts)
    exchange, notices = _exchange(given, layout, model, loss, dims, whole, facts.offloads)
    masks = "answer" in batch
    if config.loss is not None and config.loss.type == "import":
        with at("loss"), own("loss", "model"):
            sums, masks = measures(Objective(model, loss), batch)
        with at():
            check(_loss_facts(facts, given, scalars_in(sums), layout))
    with at("parallel", "xla"):
        options = compiler_options(config.parallel.xla, list(layout.mesh.local_devices))
    optim = with_compression(config.optim, config.parallel.compression)
    with at("optim"), own("optim"):
        optimizer = build_optimizer(optim, params=model.trained, dims=dims, rate=rate)
        of_rule = optim.explain(NamedParams(model.trained, dims))
    if config.parallel.deterministic is not None and exchange.zero.stage:
        with at("optim"), own("optim"):
            check_update(optimizer.transform, jax.eval_shape(optimizer.stored, model.trained))
    with at():
        averages = optimizer.eval_params is not None
        check(replace(facts, optim=replace(facts.optim, averages=averages)))
        run = RunSettings(
            total_steps=plan.total_steps, train=config.train, optim=config.optim, layout=layout,
            optimizer=optimizer, params=model.trained, dims=dims,
        )  # fmt: skip
        of_strategy = check_strategy(config.strategy, run)
    with at("parallel", "pipeline"), own("loss", "model"):
        pipeline = None
        if chunks is not None:
            parts = (config.parallel.pipeline, chunks, model, loss, stored, dims)
            pipeline = plan_parted(*parts, batch) if chunks.parted else plan_pipeline(*parts)
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
        _trace(given, program)
    of_model = model_notices(config.model, given.shapes)
    of_optimizer = notices_of_optimizer(config.optim, optimizer, model.trained)
    of_chunks = () if chunks is None else chunks.notices(stored, model, dims)
    explained = (*of_rule, *explain_exchange(config.parallel.compression, exchange))
    explained = explained if chunks is None else (*chunks.explained, *explained)
    return program, explained, (*of_model, *of_optimizer, *notices, *of_strategy, *of_chunks)


def _exchange(
    given: ProgramInputs,
    layout: Layout,
    model: Functional,
    loss: Loss,
    dims: Mapping[str, Dims],
    whole: Shardings,
    offloads: bool,
) -> tuple[Exchange, tuple[str, ...]]:
    """Return the exchange of gradients, and notices about its settings and the model's rows."""
    config = given.config
    with given.at("parallel"):
        exchange, notices = plan_exchange(
            config.parallel, layout, model.params, dims, whole, model.stacked,
            seed=config.seed, whole_matrices=config.optim.whole_matrices,
            offloads=offloads, frozen=model.frozen,
        )  # fmt: skip
        check_host_memory(exchange.zero)
    with given.at("parallel"), given.own("loss", "model") as imported:
        # Built-in models keep rows independent, so only a user's model needs a trace.
        if not imported:
            return exchange, notices
        local = config.parallel.batch_norm == "local"
        objective, pieces = Objective(model, loss), config.train.microbatches
        more = check_rows(objective, given.batch, exchange, local=local, microbatches=pieces)
        return exchange, (*notices, *more)


def _loss_facts(
    facts: Facts, given: ProgramInputs, scalars: tuple[str, ...], layout: Layout
) -> Facts:
    """Return a copy of `facts` with added facts about the loss.

    The added facts are the loss's scalars, whether examples have weights, and, for a loss with
    scalars, the reason why the held-out split cannot be evaluated as a single batch.

    Args:
      given: the config and data.
      scalars: the names of the values that the loss returns as scalars.
    """
    evaluation, held = None, given.dataset.heldout
    if scalars and held is not None:
        size, batches = given.config.train.batch_size, given.config.eval.batches
        evaluation = why_in_parts(len(held), batches, size, layout.data_size)
    return replace(facts, scalars=scalars, weighted=WEIGHT in given.batch, evaluation=evaluation)


def _what_is_trained(
    given: ProgramInputs, layout: Layout
) -> tuple[Functional, Mapping[str, Dims], Loss]:
    """Return the model, the logical dims of its parameters by name, and the loss.

    The stacks of layers in the model are detected, and its trained parameters are selected.
    """
    config, at = given.config, given.at
    with at("model"):
        model = given.model()
    with at("loss"):
        loss = given.loss()
    with at("loss"), given.own("loss", "model") as imported:
        # Built-in models mark their stacks of layers, and a trace finds the stacks of user models.
        # A model of dissimilar parts is traced part by part later.
        if imported and not model.in_parts:
            rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in given.batch.items()}
            model = model.with_stacks(lambda module, rows: loss(module, weighted(rows)), rows)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    with at("sharding"):
        dims = resolve_dims(config.sharding, shapes, model.dims, model.stacked, layout)
    with at("model"):
        model = trained_part(config.model, model.with_dims(dims))
        return model, {**dims, **{n: d for n, d in model.dims.items() if d is not None}}, loss


def _trace(given: ProgramInputs, program: Program) -> None:
    """Trace the parts of a program that may raise errors, to find the errors before compilation."""
    at, own = given.at, given.own
    if program.exchange.explicit:
        with at("parallel", "reduce"):
            program.train.trace(program.state_shapes, program.batch)
    # Built-in parts can always be traced, so only the user's code is traced a second time.
    with at("optim"), own("optim") as imported:
        if imported:
            own_state, number = program.own_shapes, jax.ShapeDtypeStruct((), jnp.float32)
            trained = program.model.divided(own_state.params)[0]
            parts = (trained, own_state.opt_state, trained)
            jax.eval_shape(program.optimizer.update, *parts, grad_norm=number, value=number)
            _ = program.state_shapes
            jax.eval_shape(program.evaluated, program.state_shapes)
    with at("train"), own("optim", "loss", "model") as imported:
        if imported:
            program.train.trace(program.state_shapes, program.batch)
