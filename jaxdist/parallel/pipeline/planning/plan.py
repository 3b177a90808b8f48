"""The choice of the number of layers of each chunk, from a config and the shapes of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax
from flax import nnx
from jax.sharding import Mesh
from pydantic import Field

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError
from jaxdist.mesh import mesh_axis_size
from jaxdist.models.functional import Functional
from jaxdist.models.loss import Loss, Model
from jaxdist.parallel.pipeline.executor.ticks import Activations
from jaxdist.parallel.pipeline.planning.estimate import block_costs, part_costs
from jaxdist.parallel.pipeline.planning.partition import (
    ROUNDING,
    LayerCosts,
    Partition,
    partition,
    weigh,
)
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.check import check_schedule
from jaxdist.pipeline_schedules.one_f_one_b import OneFOneB
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import flatten_with_names
from jaxdist.types import Leaf

AXIS = "stage"


class PipelineConfig(Config):
    """The division of the work among the stages of mesh axis `stage`, if the mesh has it."""

    schedule: PipelineScheduleConfig = OneFOneB()
    """The order of the tasks on each stage; `jaxdist pipeline compare` shows each schedule's cost.
    """
    activations: Activations = "recompute"
    """The values that the backward pass of a chunk reads: the chunk's input, from which the
    backward pass recomputes the forward pass (recompute), or residuals that the forward pass stored
    (stash)."""
    gather: Literal["step", "task"] = "step"
    """The moment at which a stage gathers the parameters that ZeRO 3 splits. With `step` a stage
    gathers the parameters of all its layers once per step, and holds them until the step ends. With
    `task` each task gathers the parameters layer by layer. A stage then holds the parameters of one
    layer at a time, but sends 2 m times the bytes, where m is the number of microbatches."""
    ahead: bool = False
    """Whether stages run forward passes earlier than in the schedule. Early forward passes reduce
    waiting, but need up to twice the memory for activations."""
    layers: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """The number of layers, or of parts, of each chunk. With null all chunks get the same number of
    layers if the number of chunks divides the number of layers. Otherwise, and for a model of
    parts, the numbers balance estimated costs."""


@dataclass(frozen=True)
class ChunkPlan:
    """The schedule of a pipeline, and the number of layers of each chunk.

    Attributes:
      schedule: the schedule.
      layers: the number of layers of each chunk, or of parts for a model of parts.
      parted: whether the model is a sequence of parts instead of a stack of equal layers.
      explained: the lines of text that explain the division into chunks.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    parted: bool
    explained: tuple[str, ...]

    def stored(self, layout: Layout) -> Layout:
        """Return the layout with which the training state is stored.

        The result is `layout`, unless its rules split the layers over the stages and the number of
        stages does not divide the number of layers. In that case every stage stores all layers.
        """
        if layout.axis_of("layers") != AXIS or sum(self.layers) % stages_of(layout.mesh) == 0:
            return layout
        rules = ((dim, None if dim == "layers" else axis) for dim, axis in layout.rules)
        return replace(layout, rules=tuple(rules))

    def notices(
        self, layout: Layout, model: Functional, dims: Mapping[str, Dims]
    ) -> tuple[str, ...]:
        """Return sentences about parameters that every stage stores, or () if there are none.

        Args:
          layout: the layout of the training state.
          model: the model that is divided into stages.
          dims: the logical dims of each parameter, by name.
        """
        layers, stages = sum(self.layers), stages_of(layout.mesh)
        if not self.parted and layers % stages == 0:
            return ()
        held = sum(
            math.prod(layout.sharding(dims[name]).shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for name, leaf in flatten_with_names(model.params)
            if self.parted or name in model.stacked
        )
        if self.parted:
            return (
                "the parameters of the stages have different shapes, so each stage stores all "
                f"parameters ({held / 1000000.0:.4g} MB on a device) and their optimizer state, "
                "which ZeRO splits. In a step each stage uses only the parameters of its own "
                "chunks",
            )
        return (
            f"{layers} layers do not divide by {stages} stages, so each stage stores all layers. "
            f"A device holds {held / 1000000.0:.4g} MB of parameters, but computes with only "
            f"about {held / stages / 1000000.0:.4g} MB of them. The device also holds the "
            "gradients and the optimizer state of all these parameters (ZeRO splits the "
            f"optimizer state). With a multiple of {stages} layers, each stage would store "
            "only the layers that it computes",
        )


def plan_chunks(
    config: PipelineConfig,
    model: Functional,
    loss: Loss,
    batch: Mapping[str, Leaf],
    *,
    stages: int,
    microbatches: int,
) -> ChunkPlan | None:
    """Choose the number of layers of each chunk, or return None if there is a single stage.

    Args:
      config: the config of the pipeline.
      model: the model to divide into chunks.
      loss: the loss to minimize.
      batch: the shapes of a batch with any number of rows.
      stages: the number of stages, which is the size of mesh axis `stage`.
      microbatches: the number of microbatches of a batch.

    Raises:
      ConfigError: the model has no blocks or parts, has fewer blocks or parts than chunks, or has
        buffers; or the schedule does not support this number of microbatches.
    """
    if stages == 1:
        return None
    layers, parted = _layers(model, stages)
    what = "parts" if parted else "layers"
    schedule = config.schedule.build(stages, microbatches)
    check_schedule(schedule)
    _check_counts(config.layers, layers, what, schedule)
    shown = f"pipeline {schedule.name}: {layers} {what} in {schedule.chunks} chunks"
    if config.layers is None and layers % schedule.chunks == 0 and not parted:
        each = layers // schedule.chunks
        return ChunkPlan(schedule, (each,) * schedule.chunks, parted, (f"{shown}, {each} in each",))
    costs = (part_costs if parted else block_costs)(model, loss, batch, layers)
    found, how = _cut(config, costs, schedule)
    lines = (
        f"{shown}, {how} (time: % of all, estimated from operations)",
        *found.explain().splitlines(),
    )
    return ChunkPlan(schedule, found.counts, parted, lines)


def stages_of(mesh: Mesh) -> int:
    """Return the number of stages of a mesh, which is 1 if the mesh has no axis `stage`.

    Raises:
      ConfigError: the axis is split over two networks.
    """
    if mesh_axis_size(mesh, AXIS) > 1 and AXIS not in mesh.shape:
        raise ConfigError(
            "mesh.stage spans two networks, but all stages must be in one network: give a single "
            "size"
        )
    return mesh_axis_size(mesh, AXIS)


def _cut(config: PipelineConfig, costs: LayerCosts, schedule: Schedule) -> tuple[Partition, str]:
    """Return the division into chunks with its costs, and a phrase for the explanation.

    The phrase is "as given" if the config gives the division, otherwise "balanced". If the given
    division is slower than the best division, the phrase also has the counts of the best division.
    """
    best = partition(costs, schedule.placement)
    if config.layers is None:
        return best, "balanced"
    given = weigh(costs, schedule.placement, config.layers)
    if max(given.seconds) <= max(best.seconds) * (1 + ROUNDING):
        return given, "as given"
    shown = ", ".join(map(str, best.counts))
    return given, (
        f"as given; the balanced counts {shown} would give a slowest chunk of "
        f"{max(best.seconds):.4g}"
    )


def _check_counts(
    given: tuple[int, ...] | None, layers: int, what: str, schedule: Schedule
) -> None:
    """Raise ConfigError unless each chunk gets a layer, and the given numbers fit the model.

    Args:
      given: the number of layers of each chunk from the config, or None if the config gives none.
      layers: the number of layers of the model.
      what: the word for layers in messages.
      schedule: the schedule, which has the numbers of stages and of chunks.
    """
    chunks, stages = schedule.chunks, schedule.stages
    where = f"{chunks} chunks (schedule {schedule.name} on {stages} stages)"
    if layers < chunks:
        fewer = "a smaller mesh.stage"
        if chunks > stages:
            fewer += f", or fewer chunks a stage ({chunks // stages} now)"
        raise ConfigError(
            f"{layers} {what} cannot fill {where}, each of which needs at least 1: use {chunks} "
            f"{what} or more, or {fewer}"
        )
    if given is not None and (len(given) != chunks or sum(given) != layers):
        raise ConfigError(
            f"layers {[*given]} are {len(given)} counts that add up to {sum(given)}, for {where} "
            f"and {layers} {what}: give {chunks} counts that add up to {layers}, or null"
        )


def _layers(model: Functional, stages: int) -> tuple[int, bool]:
    """Return the number of blocks or of parts of a model, and whether the model has parts.

    Raises:
      ConfigError: a pass of the model changes buffers, or the model has neither blocks nor parts.
    """
    made: Model = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    where = f"mesh.stage {stages}: {type(made).__name__}"
    # If a model has a function `settle`, its buffers change only there, after a step. Forward and
    # backward passes only read the buffers.
    if jax.tree.leaves(model.buffers) and model.settle is None:
        raise ConfigError(
            f"{where} keeps buffers (such as batch statistics), which a stage cannot update for "
            "other stages; leave out mesh.stage"
        )
    missing = [name for name in ("embed", "trunk", "head") if not hasattr(made, name)]
    counts = {
        leaf.shape[0] for name, leaf in flatten_with_names(model.params) if name in model.stacked
    }
    if not missing and len(counts) == 1:
        return counts.pop(), False
    if hasattr(made, "parts"):
        return len(made.parts()), True
    raise ConfigError(
        f"{where} has no blocks to divide among stages. The model needs one stack of layers (made "
        "by jaxdist.models.layers.stack or nnx.vmap, run by one scan), and the methods embed, "
        "trunk and head of jaxdist.models.layers.Stacked (missing: "
        f"{', '.join(missing) or f'it has {len(counts)} such stacks'}). Alternatively, give the "
        "model a method parts that returns its functions in order, or leave out mesh.stage"
    )
