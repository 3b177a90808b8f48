"""A model in stages: from a module with blocks and a schedule to gradients, as any other step's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.mesh import axis_names, axis_size
from jaxdist.models.functional import Functional
from jaxdist.models.layers import RESIDUAL
from jaxdist.models.loss import Batch, Loss, Sums, as_sums, weighted
from jaxdist.parallel.microbatch import split_rows
from jaxdist.parallel.pipeline.build import ScheduleConfig
from jaxdist.parallel.pipeline.check import check
from jaxdist.parallel.pipeline.chunks import from_stages, on_stages, to_stages
from jaxdist.parallel.pipeline.eager import eager
from jaxdist.parallel.pipeline.execute import evaluate, run
from jaxdist.parallel.pipeline.forward_only import forward_only
from jaxdist.parallel.pipeline.lower import lower
from jaxdist.parallel.pipeline.one_f_one_b import OneFOneB
from jaxdist.parallel.pipeline.parts import Found, Parts, Specs, Visit
from jaxdist.parallel.pipeline.ticks import Activations, Ticks
from jaxdist.sharding import Dims, Layout
from jaxdist.trees import flatten_with_names

AXIS = "stage"


class PipelineConfig(Config):
    """How the stages of mesh axis `stage` share the work, where the mesh has that axis."""

    schedule: ScheduleConfig = OneFOneB()
    """Which stage does what when; `jaxdist pipeline compare` shows what each costs."""
    activations: Activations = "recompute"
    """What the backward pass starts from: a chunk's input, or all that its forward pass left."""
    ahead: bool = False
    """Forward passes run further ahead: less waiting, for up to twice the activations."""


class Stackable(Protocol):
    """A module that a pipeline can cut; called, it is head(trunk(embed(*inputs), *inputs))."""

    def embed(self, *inputs: Any) -> jax.Array: ...
    def trunk(self, x: jax.Array, *inputs: Any) -> jax.Array: ...
    def head(self, x: jax.Array) -> Any: ...


@dataclass(frozen=True)
class Pipeline:
    """What the training and the evaluation step do where layers lie on several stages.

    Attributes:
      dims: logical dims of each parameter, by name.
      ticks: of training, `forward` of evaluation.
    """

    model: Functional
    loss: Loss
    layout: Layout
    dims: Mapping[str, Dims]
    ticks: Ticks
    forward: Ticks

    def gradients(
        self, params: Any, buffers: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, Sums, Any]:
        """Gradients of the total loss of a batch, all sums, and the buffers, which are none."""
        layers, shared = self._apart(params)
        rows = split_rows(dict(batch), self.ticks.microbatches, self.layout)
        everywhere, here = PartitionSpec(), PartitionSpec(AXIS)

        def local(chunks: Any, shared: Any, rows: Any, key: jax.Array) -> Found:
            parts, specs = self._parts(training=True), self._specs
            return run(self.ticks, parts, chunks, shared, rows, axis=AXIS, key=key, specs=specs)

        inside = (here, everywhere, everywhere, everywhere)
        on_stages = self._on_stages(local, inside, Found(here, everywhere, everywhere))
        found = on_stages(self._to_stages(layers), shared, rows, key)
        grads = self._together(self._from_stages(found.chunk_grads), found.shared_grads)
        return grads, found.sums, buffers

    def evaluate(self, params: Any, batch: Batch) -> Sums:
        """The sums of a batch, in evaluation mode."""
        layers, shared = self._apart(params)
        rows = split_rows(dict(batch), self.forward.microbatches, self.layout)
        everywhere, data = PartitionSpec(), self._axes_of("batch")

        def local(chunks: Any, shared: Any, rows: Any) -> Sums:
            parts, specs = self._parts(training=False), self._specs
            found = evaluate(self.forward, parts, chunks, shared, rows, axis=AXIS, specs=specs)
            return jax.lax.psum(found, data)

        inside = (PartitionSpec(AXIS), everywhere, PartitionSpec(None, data))
        on_stages = self._on_stages(local, inside, everywhere, *data)
        return on_stages(self._to_stages(layers), shared, rows)

    def _on_stages(
        self, local: Callable[..., Any], inside: Any, outside: Any, *more: str
    ) -> Callable[..., Any]:
        """`local` on each stage, manual on `more` axes too; it may be in a `jax.shard_map`."""
        nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.shard_map(
            local,
            mesh=None if nested else self.layout.mesh,
            axis_names={AXIS, *more},
            in_specs=inside,
            out_specs=outside,
            check_vma=False,
        )

    def _parts(self, *, training: bool) -> Parts:
        layers, shared = self._apart(self.model.params)

        def bind(layers: Any, shared: Any, visit: Visit) -> Any:
            module = self.model.bind(self._together(layers, shared), {}, visit.key)
            module.train() if training else module.eval()
            return module

        def inputs(visit: Visit) -> tuple[Any, ...]:
            return _inputs(self.loss, weighted(visit.rows))

        def embed(shared: Any, visit: Visit) -> jax.Array:
            return bind(_absent(layers), shared, visit).embed(*inputs(visit))

        def blocks(layers: Any, x: jax.Array, visit: Visit) -> jax.Array:
            return bind(layers, _absent(shared), visit).trunk(x, *inputs(visit))

        def head(shared: Any, x: jax.Array, visit: Visit) -> tuple[jax.Array, Sums]:
            module, batch = bind(_absent(layers), shared, visit), weighted(visit.rows)
            sums = as_sums(self.loss(lambda *_: module.head(x), batch), batch)
            return sums["loss"].total, sums

        return Parts(embed, blocks, head)

    @cached_property
    def _specs(self) -> Specs:
        """How axes that are left to XLA split what a stage holds."""
        manual = {AXIS, *self._axes_of("batch")}

        def spec(dims: Dims) -> PartitionSpec:
            entries = (self.layout.spec((dim,))[0] if dim != "layers" else None for dim in dims)
            return PartitionSpec(*(None if manual & {*_names(e)} else e for e in entries))

        structure = jax.tree.structure(self.model.params)
        names = [name for name, _ in flatten_with_names(self.model.params)]
        chunk, shared = self._apart(structure.unflatten([spec(self.dims[name]) for name in names]))
        return Specs(chunk, shared, spec(RESIDUAL))

    def _axes_of(self, dim: str) -> tuple[str, ...]:
        axis = self.layout.axis_of(dim)
        return axis_names(self.layout.mesh, axis) if axis else ()

    def _apart(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Of a tree like the parameters: the leaves of stacked layers, and the others."""
        apart: tuple[list[Any], list[Any]] = ([], [])
        for name, leaf in flatten_with_names(tree):
            apart[name not in self.model.scanned].append(leaf)
        return apart

    def _together(self, layers: list[Any], shared: list[Any]) -> Any:
        """The inverse of `_apart`."""
        left = {True: iter(layers), False: iter(shared)}
        names = [name for name, _ in flatten_with_names(self.model.params)]
        leaves = [next(left[name in self.model.scanned]) for name in names]
        return jax.tree.structure(self.model.params).unflatten(leaves)

    def _to_stages(self, layers: list[jax.Array]) -> list[jax.Array]:
        """`[layers, ...]` as `[chunks, layers of each, ...]`, a stage's chunks side by side."""
        chunks = [x.reshape(self.ticks.chunks, -1, *x.shape[1:]) for x in layers]
        return chunks if self._in_order else to_stages(chunks, self.ticks.placement)

    def _from_stages(self, chunks: list[jax.Array]) -> list[jax.Array]:
        ordered = chunks if self._in_order else from_stages(chunks, self.ticks.placement)
        return [x.reshape(-1, *x.shape[2:]) for x in ordered]

    @property
    def _in_order(self) -> bool:
        return on_stages(self.ticks.placement) == tuple(range(self.ticks.chunks))


def plan_pipeline(
    config: PipelineConfig,
    model: Functional,
    loss: Loss,
    layout: Layout,
    dims: Mapping[str, Dims],
    microbatches: int,
) -> Pipeline | None:
    """The pipeline of a mesh with stages; None where it has none.

    Raises:
      ConfigError: a model without blocks, or with buffers; layers that do not fill the chunks;
        microbatches that do not fit the schedule.
    """
    if axis_size(layout.mesh, AXIS) == 1:
        return None
    if AXIS not in layout.mesh.shape:
        raise ConfigError("mesh.stage lies over two networks, and stages are one axis: give a size")
    stages = axis_size(layout.mesh, AXIS)
    layers = _layers(model, stages)
    schedule = config.schedule.build(stages, microbatches)
    if layers % schedule.chunks:
        raise ConfigError(
            f"{layers} layers do not fill {schedule.chunks} chunks on {stages} stages alike "
            f"({layers % schedule.chunks} left over): use a multiple of {schedule.chunks}"
        )
    check(schedule)
    trained = eager(schedule) if config.ahead else schedule
    evaluated = forward_only(schedule.placement, microbatches)
    ticks, forward = (lower(s, activations=config.activations) for s in (trained, evaluated))
    return Pipeline(model, loss, layout, dims, ticks, forward)


def _layers(model: Functional, stages: int) -> int:
    """How many layers the blocks of a model have."""
    made = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    missing = [name for name in ("embed", "trunk", "head") if not hasattr(made, name)]
    counts = {
        leaf.shape[0] for name, leaf in flatten_with_names(model.params) if name in model.scanned
    }
    if missing or len(counts) != 1:
        raise ConfigError(
            f"mesh.stage {stages}: {type(made).__name__} has no blocks to share out over stages: "
            "it needs layers from jaxdist.models.layers.stack, and methods embed, trunk and head "
            f"(missing: {', '.join(missing) or 'one stack of layers'}); take mesh.stage away"
        )
    if jax.tree.leaves(model.buffers):
        raise ConfigError(
            f"mesh.stage {stages}: {type(made).__name__} keeps buffers (such as batch statistics), "
            "which no stage could update for the others; take mesh.stage away"
        )
    return counts.pop()


class _CalledError(Exception):
    """Carries what a loss calls its module with."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


def _inputs(loss: Loss, batch: Batch) -> tuple[Any, ...]:
    """What a loss calls its module with."""

    def module(*inputs: Any) -> Any:
        raise _CalledError(inputs)

    try:
        loss(module, batch)
    except _CalledError as called:
        return called.inputs
    raise ConfigError("the loss does not call the model, so that a pipeline cannot feed it")


def _absent(leaves: list[Any]) -> list[jax.Array]:
    """Zeros in the place of parameters that a part of the model does not use."""
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (() if entry is None else (entry,))
