"""The computation of gradients on pipeline stages, for a model with a stack of equal layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.errors import ConfigError
from jaxdist.mesh import mesh_axis_size
from jaxdist.models.feed_forward.router import Statistics
from jaxdist.models.functional import Functional
from jaxdist.models.hints import RESIDUAL
from jaxdist.models.loss import Batch, Loss, Sums, arranged, as_sums, weighted
from jaxdist.models.mean import check_adds_up, divisor
from jaxdist.parallel.compute import over_weight
from jaxdist.parallel.contract import BatchContext, Gradients, StepInputs
from jaxdist.parallel.microbatch import split_rows
from jaxdist.parallel.pipeline.called import inputs_of
from jaxdist.parallel.pipeline.executor.buffers import zeros
from jaxdist.parallel.pipeline.executor.execute import evaluate_pipeline, run_pipeline
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.model_fns import (
    Activation,
    GradientsAndSums,
    ModelFns,
    StageSpecs,
    Visit,
)
from jaxdist.parallel.pipeline.executor.stage import StageContext
from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.parallel.pipeline.model.chunks import Cut, from_stages, on_stages, to_stages
from jaxdist.parallel.pipeline.model.stack import StageStack, is_in_order
from jaxdist.parallel.pipeline.planning.plan import AXIS, ChunkPlan, PipelineConfig
from jaxdist.parallel.pipeline.stand_in import HeadOnly
from jaxdist.pipeline_schedules.derived import eager, forward_only
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import flatten_with_names, join_leaves
from jaxdist.types import Buffers, Leaf, Params, PyTree, Specs

Apart = tuple[list[Any], list[Any]]
"""A pair of lists: the leaves of stacked layers, and all other leaves."""


@dataclass(frozen=True)
class Pipeline:
    """The implementation of `Compute` for a model whose layers are on several stages.

    If `stack` is not None, stacked parameters are stored in the order by stage: the layers of stage
    0, then the layers of stage 1, and so on.

    Attributes:
      model: the model that the stages compute together.
      loss: the loss to minimize.
      layout: the layout of the training state.
      dims: the logical dims of each parameter, by name.
      ticks: the lowered schedule for training.
      forward: the lowered schedule for evaluation.
      cut: the division of the layers into chunks.
    """

    model: Functional
    loss: Loss
    layout: Layout
    dims: Mapping[str, Dims]
    ticks: Ticks
    forward: Ticks
    cut: Cut
    explicit: bool = field(default=True, init=False)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of the schedule, which is the same for batches of any size."""
        return self.ticks.microbatches

    def resized(self, microbatches: int) -> Pipeline:
        """Return the pipeline itself, because a schedule has a fixed number of microbatches."""
        return self

    def gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the total loss of a batch, and the sums; buffers are unchanged.

        With a loss scale, the cotangents in the pipeline are cotangents of the mean loss of a
        microbatch times the scale. The returned gradients are divided by the same factor.

        Args:
          held: the inputs, with the parameters in the form in which they are stored. A parameter
            may be a `Deferred`; the gradient then has the form of the array in the `Deferred`.
          around: the context, which is not used.

        Returns:
          The gradients, in the form in which the parameters are stored, with sums and buffers.
        """
        (layers, shared), frozen = self._divided(held.params)
        rows = split_rows(arranged(self.loss, held.batch), self.microbatches, self.layout)
        factor = None
        if held.scale is not None:
            factor = held.scale.scale / self._weight(shared, frozen[1], rows)
        everywhere, here = PartitionSpec(), PartitionSpec(AXIS)

        def local(
            chunks: PyTree, shared: PyTree, frozen: PyTree, rows: PyTree, key: Leaf, factor: Leaf
        ) -> GradientsAndSums:
            parts = self._parts(training=True, factor=factor)
            given = self.ticks, parts, chunks, shared, rows, AXIS, key, self._specs, frozen
            return run_pipeline(StageContext(*given))

        inside = (here, everywhere, (here, everywhere), everywhere, everywhere, everywhere)
        on_stages = self._on_stages(local, inside, GradientsAndSums(here, everywhere, everywhere))
        held_too = self._on_all_stages(frozen, held.buffers)
        found = on_stages(self._to_stages(layers), shared, held_too, rows, held.key, factor)
        own = self.model.trained
        grads = self._together(self._from_stages(found.chunk_grads), found.shared_grads, own)
        if factor is not None:
            grads = jax.tree.map(lambda g: g / factor, grads)
        return Gradients(grads, found.sums, held.buffers)

    def mean_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the mean loss of the whole batch.

        The arguments are the arguments of `gradients`.
        """
        return over_weight(self.gradients(held, around))

    def _weight(self, shared: PyTree, frozen: list[Any], rows: PyTree) -> jax.Array:
        """Return the mean weight over all microbatches and devices, or 1 if the mean is 0.

        Args:
          shared: the parameters of embedding and head.
          frozen: the frozen parameters of embedding and head.
          rows: the microbatches.
        """
        # The shapes are from the model, because a parameter of a step may be a `Deferred`.
        chunk = self._divided(self.model.params)[1][0], self.model.buffers
        held = zeros(chunk), frozen
        visit = Visit(jax.tree.map(lambda leaf: leaf[0], rows), jnp.int32(0), None, held)
        parts = self._parts(training=False)
        x = jax.eval_shape(parts.embed, shared, visit)

        def weight(rows: PyTree) -> jax.Array:
            # A loss returns its weight only together with its total. The total is not used here,
            # so zeros can replace the activations.
            return parts.head(shared, zeros(x), visit._replace(rows=rows))[1]["loss"].weight

        mean = jax.lax.stop_gradient(jax.lax.map(weight, rows).mean())
        axes = self.layout.batch_axes
        mean = jax.lax.pmean(mean, axes) if axes else mean
        return divisor(mean)

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """Compute the sums of the loss and its metrics over a batch, in evaluation mode."""
        (layers, shared), frozen = self._divided(params)
        rows = split_rows(arranged(self.loss, batch), self.forward.microbatches, self.layout)
        everywhere, here, data = PartitionSpec(), PartitionSpec(AXIS), self.layout.batch_axes

        def local(chunks: PyTree, shared: PyTree, frozen: PyTree, rows: PyTree) -> Sums:
            parts = self._parts(training=False)
            given = self.forward, parts, chunks, shared, rows, AXIS, None, self._specs, frozen
            return jax.lax.psum(evaluate_pipeline(StageContext(*given)), data)

        inside = (here, everywhere, (here, everywhere), PartitionSpec(None, data))
        on_stages = self._on_stages(local, inside, everywhere, *data)
        held_too = self._on_all_stages(frozen, buffers)
        return on_stages(self._to_stages(layers), shared, held_too, rows)

    def _on_all_stages(self, frozen: Apart, buffers: Buffers) -> tuple[PyTree, list[Any]]:
        """Separate the frozen parameters and buffers of chunks from the other frozen parameters.

        Returns:
          Two values. The first value is the pair of the chunks' frozen parameters and the buffers,
          both grouped by stage. The second value is the list of the frozen parameters outside the
          chunks.
        """
        # The buffers are biases of routers, in the order of the layers. No axis splits the buffers.
        by_chunk = jax.tree.map(lambda leaf: leaf[self.cut.index], buffers)
        held = to_stages(by_chunk, self.ticks.placement)
        return (self._to_stages(frozen[0]), held), frozen[1]

    def _on_stages(
        self, local: Callable[..., Any], inside: Specs, outside: Specs, *more: str
    ) -> Callable[..., Any]:
        """Return `local` in a `jax.shard_map` that is manual on the stage axis and on `more` axes.

        Args:
          local: the function that each stage runs.
          inside: the partition specs of the arguments of `local`.
          outside: the partition specs of the results of `local`.
          more: the names of the manual axes besides the stage axis.
        """
        # Inside another `jax.shard_map`, jax takes the mesh from the context.
        nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.shard_map(
            local,
            mesh=None if nested else self.layout.mesh,
            axis_names={AXIS, *more},
            in_specs=inside,
            out_specs=outside,
            check_vma=False,
        )

    def _parts(self, *, training: bool, factor: jax.Array | None = None) -> ModelFns:
        (layers, shared), _ = self._divided(self.model.params)
        own, others = self.model.divided(self.model.params)
        routed = self.model.routed

        def bind(layers: PyTree, shared: PyTree, visit: Visit) -> Any:
            (frozen_layers, buffers), frozen_shared = visit.frozen
            frozen = self._together(frozen_layers, frozen_shared, others)
            params = join_leaves(self._together(layers, shared, own), frozen)
            module: Any = self.model.bind(params, buffers, visit.key)
            module.train() if training else module.eval()
            return module

        def inputs(visit: Visit) -> tuple[Any, ...]:
            return inputs_of(self.loss, weighted(visit.rows), routed=routed)

        def embed(shared: PyTree, visit: Visit) -> Activation:
            module = bind(zeros(layers), shared, visit)
            return (module.routed_embed if routed else module.embed)(*inputs(visit))

        def trunk(layers: PyTree, x: Activation, visit: Visit) -> Activation:
            module = bind(layers, zeros(shared), visit)
            return (module.routed_trunk if routed else module.trunk)(x, *inputs(visit))

        def blocks(layers: PyTree, x: Activation, visit: Visit) -> Activation:
            if self.cut.even:
                return trunk(layers, x, visit)
            key = visit.key
            keys = None if key is None else jax.random.split(key, self.cut.most)

            frozen, others = visit.frozen

            def layer(own: PyTree, x: Activation) -> Activation:
                alone, key = own
                one, fixed = jax.tree.map(lambda leaf: leaf[None], alone)
                return trunk(one, x, visit._replace(key=key, frozen=(fixed, others)))

            return self.cut.scan(layer, ((layers, frozen), keys), x, visit.chunk)

        def head(shared: PyTree, x: Activation, visit: Visit) -> tuple[jax.Array, Sums]:
            module = bind(zeros(layers), shared, visit)
            return minimised(self.loss, HeadOnly.of(module, x), visit, factor)

        return ModelFns(embed, blocks, head)

    @cached_property
    def _specs(self) -> StageSpecs:
        """The partition specs of a stage's values over auto axes."""
        manual = {AXIS, *self.layout.batch_axes}

        def spec(dims: Dims) -> PartitionSpec:
            entries = ([n for n in self.layout.names_of(dim) if n not in manual] for dim in dims)
            return PartitionSpec(*(tuple(names) or None for names in entries))

        structure = jax.tree.structure(self.model.params)
        names = [name for name, _ in flatten_with_names(self.model.params)]
        specs = structure.unflatten([spec(self.dims[name]) for name in names])
        (chunk, shared), _ = self._divided(specs)
        x: Specs = spec(RESIDUAL)
        if self.model.routed:
            of_sums: Any = spec(("batch", None))
            of_load: Any = spec((None, "batch", None))
            x = x, Statistics(of_sums, of_load)
        return StageSpecs(chunk, shared, x)

    def _divided(self, tree: PyTree) -> tuple[Apart, Apart]:
        """Divide a tree like the parameters into the trained and the frozen leaves.

        Each of the two results has a list of the leaves of stacked layers, and a list of all other
        leaves.
        """
        parts = self.model.divided(self.model.params)
        own, frozen = zip(self.model.divided(tree), parts, strict=True)
        return self._apart(*own), self._apart(*frozen)

    def _apart(self, tree: PyTree, like: PyTree) -> Apart:
        """Divide the leaves of a tree into leaves of stacked layers and other leaves.

        Args:
          tree: a tree with the structure of `like`, in which a leaf may be a subtree.
          like: a tree whose leaves have the names of parameters.
        """
        apart: Apart = ([], [])
        leaves = jax.tree.structure(like).flatten_up_to(tree)
        for (name, _), leaf in zip(flatten_with_names(like), leaves, strict=True):
            apart[name not in self.model.stacked].append(leaf)
        return apart

    def _together(self, layers: list[Any], shared: list[Any], like: PyTree) -> PyTree:
        """Build a tree with the structure of `like` from the lists that `_apart` returns."""
        left = {True: iter(layers), False: iter(shared)}
        names = [name for name, _ in flatten_with_names(like)]
        leaves = [next(left[name in self.model.stacked]) for name in names]
        return jax.tree.structure(like).unflatten(leaves)

    def _to_stages(self, layers: list[Any]) -> list[Any]:
        """Rearrange leaves from `[layers, ...]` to `[entries, layers of a chunk, ...]`, by stage.

        `chunks.on_stages` lists the chunk of each entry.
        """
        placement = self.ticks.placement
        if not self.cut.even:
            # All layers are on every stage here, and each stage selects the layers of its chunks.
            # A single lookup for all stages would crash XLA's partitioner if data and tensor axes
            # split the leaf too.
            index = jnp.asarray(to_stages(self.cut.index, placement))
            everywhere, here = PartitionSpec(), PartitionSpec(AXIS)

            def select(layers: list[Any], index: jax.Array) -> list[Any]:
                return jax.tree.map(lambda leaf: leaf[index], layers)

            return self._on_stages(select, (everywhere, here), here)(layers, index)
        chunks = self.cut.to_chunks(layers)
        return chunks if self._arranged else to_stages(chunks, placement)

    def _from_stages(self, chunks: list[Any]) -> list[Any]:
        if not self.cut.even:
            # The chunks are gathered before layers are selected from them. Otherwise XLA would send
            # each layer by itself.
            chunks = [self._gathered(*pair) for pair in zip(chunks, self._specs.chunk, strict=True)]
        ordered = chunks if self._arranged else from_stages(chunks, self.ticks.placement)
        return self.cut.from_chunks(ordered)

    def _gathered(self, chunks: PyTree, spec: PartitionSpec) -> PyTree:
        """Gather the chunks of all stages on every stage.

        Args:
          chunks: leaves `[chunks, ...]` that are split over the stage axis.
          spec: the partition spec of a single chunk, without the first dim.
        """
        inside = jax.sharding.get_abstract_mesh()
        mesh = inside if inside.manual_axes else self.layout.mesh
        whole = NamedSharding(mesh, PartitionSpec(None, *spec))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), chunks)

    @property
    def _arranged(self) -> bool:
        """Whether stacked parameters are stored in the order by stage."""
        return self.stack is not None or is_in_order(self.ticks.placement)

    @cached_property
    def stack(self) -> StageStack | None:
        """The order by stage in which stacked layers are stored, or None for the model's order."""
        placement, split = self.ticks.placement, self.layout.axis_of("layers") == AXIS
        if not split or not self.cut.even or is_in_order(placement) or -1 in on_stages(placement):
            return None
        return StageStack(self.layout.mesh, AXIS, placement)


def plan_pipeline(
    config: PipelineConfig,
    plan: ChunkPlan,
    model: Functional,
    loss: Loss,
    layout: Layout,
    dims: Mapping[str, Dims],
) -> Pipeline:
    """Build the pipeline of a model with a stack of equal layers.

    Args:
      config: the config of the pipeline.
      plan: the plan that `plan_chunks` returns for the same config and model.
      model: the model, whose module has the methods of `jaxdist.models.layers.Stacked`.
      loss: the loss to minimize.
      layout: the layout of the training state (`plan.stored`).
      dims: the logical dims of each parameter, by name.

    Raises:
      ConfigError: a mesh axis splits the sequence of activations between layers, on CPU.
    """
    axis = layout.axis_of(RESIDUAL[1])
    if (
        axis not in (None, layout.axis_of("seq"))
        and mesh_axis_size(layout.mesh, axis) > 1
        and layout.mesh.devices.flat[0].platform == "cpu"
    ):
        raise ConfigError(
            f"sharding.rules.{RESIDUAL[1]} {axis} with mesh.stage would deadlock on CPU. XLA "
            "would exchange shards of sequences within a task of one stage, but on CPU the "
            f"exchange waits for the devices of all stages. Set sharding.rules.{RESIDUAL[1]}: "
            "null (TPU programs support it)"
        )
    ticks, forward = lowered(config, plan.schedule)
    return Pipeline(model, loss, layout, dims, ticks, forward, Cut(plan.layers))


def lowered(config: PipelineConfig, schedule: Schedule) -> tuple[Ticks, Ticks]:
    """Lower a schedule to ticks for training, and to ticks with forward tasks for evaluation.

    Raises:
      ConfigError: some tasks of the schedule would wait for each other forever.
    """
    in_ticks = partial(lower, activations=config.activations)
    evaluated = forward_only(schedule.placement, schedule.microbatches)
    try:
        trained = in_ticks(eager(schedule) if config.ahead else schedule)
    except ConfigError as error:
        if not config.ahead:
            raise
        in_ticks(schedule)  # A schedule that is itself wrong raises its own error here.
        raise ConfigError(
            f"parallel.pipeline.ahead: with {schedule.microbatches} microbatches, {schedule.name} "
            "does not allow stages to run their forward tasks ahead, since some would wait for "
            "each other; set ahead: false, or change train.microbatches"
        ) from error
    return trained, in_ticks(evaluated)


def minimised(
    loss: Loss, outputs: Callable[..., Any], visit: Visit, factor: jax.Array | None
) -> tuple[jax.Array, Sums]:
    """Compute the scalar to minimize for a microbatch, and the sums of loss and metrics.

    Args:
      loss: the loss to minimize.
      outputs: the stand-in that the loss gets instead of the model.
      visit: the visit, which has the rows of the microbatch.
      factor: the factor by which the total loss is multiplied, or None to minimize the total loss
        itself.
    """
    batch = weighted(visit.rows)
    sums = as_sums(loss(outputs, batch), batch)
    check_adds_up(sums, "each microbatch of a pipeline is computed by itself")
    total = sums["loss"].total
    return total if factor is None else total * factor, sums
