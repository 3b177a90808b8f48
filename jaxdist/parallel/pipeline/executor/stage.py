"""The values that the tasks of a pipeline stage read, and the state that they change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdist.models.layers import carried
from jaxdist.parallel.pipeline.executor.branches import FIRST, tick_scope
from jaxdist.parallel.pipeline.executor.buffers import (
    buffer,
    constrain,
    no_gradients,
    read_slot,
    zeros,
)
from jaxdist.parallel.pipeline.executor.model_fns import (
    Activation,
    ModelFns,
    StageSpecs,
    Sums,
    Visit,
)
from jaxdist.parallel.pipeline.executor.residuals import Residuals, find_residuals
from jaxdist.parallel.pipeline.executor.ticks import Ticks, TickTasks
from jaxdist.parallel.pipeline.split_backward.split import SplitFunction, split_function
from jaxdist.types import Grads, Params, PyTree, Specs


class StageState(NamedTuple):
    """The state of a stage between ticks: buffers `[slots, ...]`, and sums over microbatches.

    Attributes:
      inputs: the buffer of the inputs of chunks.
      gradients: the buffer of the gradients of the outputs of chunks.
      residuals: the buffer of the values that forward tasks store for backward tasks. With
        recomputation this buffer is None.
      kept: the buffer of values that INPUT tasks store for WEIGHT tasks, or None without such
        tasks.
      chunk_grads: the sums of the gradients of this stage's chunks, `[chunks per stage, ...]`.
      shared_grads: the sums of the gradients of embedding and head, from this stage's tasks only.
      sums: the sums of the head, which are zero except on the stage of the last chunk.
    """

    inputs: Activation
    gradients: Activation
    residuals: PyTree
    kept: PyTree
    chunk_grads: Grads
    shared_grads: Grads
    sums: Sums


@dataclass(frozen=True)
class StageContext:
    """The values that the tasks of a stage read, inside the `jax.shard_map` of `run_pipeline`.

    Attributes:
      ticks: the lowered schedule.
      model: the model as three functions.
      chunk_params: the parameters of this stage's chunks, leaves `[chunks per stage, ...]`
        (`chunks.to_stages`).
      shared: the parameters of embedding and head, the same on all stages.
      microbatches: the batch, leaves `[microbatches, ...]`, the same on all stages.
      axis: the mesh axis of the stages.
      key: the random key for dropout and other random layers, or None without random layers and in
        evaluation.
      specs: the partition specs over auto axes, which are also the specs of sums of gradients, or
        None if no auto axis splits parameters.
      frozen: the frozen parameters of the chunks, in the form of `chunk_params`, and the frozen
        parameters of embedding and head, in the form of `shared`.
    """

    ticks: Ticks
    model: ModelFns
    chunk_params: Params
    shared: Params
    microbatches: PyTree
    axis: str
    key: jax.Array | None = None
    specs: StageSpecs | None = None
    frozen: tuple[Params, Params] = ((), ())

    @property
    def last(self) -> int:
        """The index of the last chunk of the model."""
        return self.ticks.chunks - 1

    @property
    def stashes(self) -> bool:
        """Whether backward tasks use stored residuals instead of recomputing the forward pass."""
        return self.ticks.activations == "stash"

    def visit(self, work: TickTasks) -> Visit:
        """Return the visit of a task: its microbatch, chunk, random key and frozen parameters.

        The key depends only on the microbatch and the chunk, so all schedules draw the same masks.
        """
        key = self.key
        if key is not None:
            key = jax.random.fold_in(jax.random.fold_in(key, work.microbatch), work.chunk)
        chunks, shared = self.frozen
        rows, frozen = read_slot(self.microbatches, work.microbatch), read_slot(chunks, work.local)
        return Visit(rows, work.chunk, key, (frozen, shared))

    def params(self, work: TickTasks) -> Params:
        """Return the parameters of a task's chunk."""
        return read_slot(self.chunk_params, work.local)

    def embed(self, shared: Params, visit: Visit) -> Activation:
        """Compute the first chunk's input."""
        return self.model.embed(shared, _with_key(visit, 0))

    def blocks(self, params: Params, x: Activation, visit: Visit) -> Activation:
        """Compute a chunk's output from its input."""
        return self.model.blocks(params, x, _with_key(visit, 1))

    def head(self, shared: Params, x: Activation, visit: Visit) -> tuple[jax.Array, Sums]:
        """Compute the scalar to minimize, and the sums, from the output of the last chunk."""
        return self.model.head(shared, x, _with_key(visit, 2))

    def x(self, inputs: Activation, work: TickTasks, visit: Visit) -> Activation:
        """Return the input of a task's chunk.

        The first chunk gets the embedding. Other chunks get a received value from `inputs`.
        """
        with tick_scope(FIRST):
            return lax.cond(
                work.chunk == 0,
                lambda: self.laid_out(self.embed(self.shared, visit)),
                lambda: self.laid_out(read_slot(inputs, work.input)),
            )

    def laid_out(self, x: Activation) -> Activation:
        """Constrain `x` to the sharding, over auto axes, of activations between chunks.

        XLA needs the same sharding in both branches of a conditional.
        """
        return x if self.specs is None else constrain(x, self.x_specs, 0)

    @cached_property
    def _shapes(self) -> tuple[Params, Visit]:
        """The shapes of a chunk's parameters, and the shapes of a `Visit`."""
        work = TickTasks(*(jnp.int32(0) for _ in TickTasks._fields))
        return jax.eval_shape(lambda: (self.params(work), self.visit(work)))

    @cached_property
    def x_shapes(self) -> PyTree:
        """The shapes of the activations between chunks."""
        return jax.eval_shape(self.embed, self.shared, self._shapes[1])

    @cached_property
    def x_specs(self) -> Specs:
        """The partition specs, over auto axes, of the activations between chunks.

        If `StageSpecs.x` is a single spec, the leaves with the same number of dims as this spec get
        this spec, and other leaves are not split.
        """
        assert self.specs is not None
        spec = self.specs.x
        if not isinstance(spec, PartitionSpec):
            return spec
        return jax.tree.map(
            lambda s: spec if s.ndim == len(spec) else PartitionSpec(), self.x_shapes
        )

    @cached_property
    def residuals(self) -> Residuals:
        """The forward and backward passes of a chunk with stored residuals."""
        return find_residuals(self.blocks, *self._shapes, self.x_shapes)

    @cached_property
    def split_backward(self) -> SplitFunction:
        """The backward pass of a chunk in two halves, for INPUT and WEIGHT tasks.

        Both halves take the pair (parameters, visit). Only the first half takes the pair
        (residuals, gradient of the output).
        """

        def backward(at_hand: PyTree, given: PyTree) -> tuple[Activation, Grads]:
            (params, visit), (residuals, dy) = at_hand, given
            grads, dx = self.residuals.backward(params, visit, residuals)(dy)
            return dx, carried(grads)

        return split_function(backward, self._shapes, ([*self.residuals.shapes], self.x_shapes))

    def initial(self) -> StageState:
        """Return the state before the first tick: buffers and sums of zeros."""
        slots, x = self.ticks.slots, self.x_shapes
        state = StageState(*(None for _ in StageState._fields))._replace(
            inputs=buffer(x, slots.inputs),
            sums=zeros(jax.eval_shape(self.head, self.shared, x, self._shapes[1])[1]),
        )
        if not self.ticks.trains:
            return state
        return state._replace(
            gradients=buffer(x, slots.gradients),
            residuals=buffer([*self.residuals.shapes], slots.residuals) if self.stashes else None,
            kept=buffer([*self.split_backward.kept], slots.kept) if slots.kept else None,
            chunk_grads=no_gradients(carried(self.chunk_params)),
            shared_grads=no_gradients(carried(self.shared)),
        )

    def split(self, state: StageState) -> StageState:
        """Constrain the state to the shardings of parameters and activations over auto axes.

        Without these constraints, XLA would gather the gradients of each microbatch before it adds
        them up.
        """
        specs = self.specs
        if specs is None:
            return state
        state = state._replace(inputs=constrain(state.inputs, self.x_specs, 1))
        if not self.ticks.trains:
            return state
        return state._replace(
            gradients=constrain(state.gradients, self.x_specs, 1),
            chunk_grads=constrain(state.chunk_grads, specs.chunk, 1),
            shared_grads=constrain(state.shared_grads, specs.shared, 0),
        )


def _with_key(visit: Visit, part: int) -> Visit:
    """Return a visit with another key for each part: embed (0), blocks (1) or head (2).

    A visit without a key is returned unchanged.
    """
    if visit.key is None:
        return visit
    return visit._replace(key=jax.random.fold_in(visit.key, part))
