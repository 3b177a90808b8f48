"""What the tasks of a stage have in common: their microbatch, parameters, input, and state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdist.models.layers import carried
from jaxdist.parallel.pipeline.executor.buffers import buffer, constrain, no_gradients, read, zeros
from jaxdist.parallel.pipeline.executor.parts import Parts, Specs, Visit
from jaxdist.parallel.pipeline.executor.residuals import Residuals, find_residuals
from jaxdist.parallel.pipeline.executor.ticks import Ticks, Work
from jaxdist.parallel.pipeline.split_backward.halves import Halves, halve


class State(NamedTuple):
    """What a stage holds from tick to tick: buffers `[slots, ...]`, and sums.

    Attributes:
      inputs: of chunks that a task is still to read.
      gradients: of chunks' outputs.
      residuals: what forward tasks leave to backward tasks.
      kept: what INPUT tasks leave to WEIGHT tasks.
    """

    inputs: Any
    gradients: Any
    residuals: Any
    kept: Any
    chunk_grads: Any
    shared_grads: Any
    sums: Any


@dataclass(frozen=True)
class Stage:
    """One stage, inside `jax.shard_map`; attributes as the arguments of `execute.run`."""

    ticks: Ticks
    parts: Parts
    chunk_params: Any
    shared: Any
    microbatches: Any
    axis: str
    key: jax.Array | None
    specs: Specs | None

    @property
    def last(self) -> int:
        """The last chunk of the model."""
        return self.ticks.chunks - 1

    @property
    def stashes(self) -> bool:
        """Whether the backward pass starts from residuals."""
        return self.ticks.activations == "stash"

    def visit(self, work: Work) -> Visit:
        """The microbatch of a task, with a key of its own."""
        key = self.key
        if key is not None:
            key = jax.random.fold_in(jax.random.fold_in(key, work.microbatch), work.chunk)
        return Visit(read(self.microbatches, work.microbatch), work.chunk, key)

    def params(self, work: Work) -> Any:
        """The parameters of a task's chunk."""
        return read(self.chunk_params, work.local)

    def embed(self, shared: Any, visit: Visit) -> Any:
        """The first chunk's input."""
        return self.parts.embed(shared, _with_key(visit, 0))

    def blocks(self, params: Any, x: Any, visit: Visit) -> Any:
        """A chunk's output."""
        return self.parts.blocks(params, x, _with_key(visit, 1))

    def head(self, shared: Any, x: Any, visit: Visit) -> tuple[jax.Array, Any]:
        """What is minimised, and sums."""
        return self.parts.head(shared, x, _with_key(visit, 2))

    def x(self, inputs: Any, work: Work, visit: Visit) -> Any:
        """The input of a chunk: the embedding, or what has arrived."""
        return lax.cond(
            work.chunk == 0,
            lambda: self.laid_out(self.embed(self.shared, visit)),
            lambda: self.laid_out(read(inputs, work.input)),
        )

    def laid_out(self, x: Any) -> Any:
        """What goes from chunk to chunk, laid out over automatic axes: in both branches alike."""
        return x if self.specs is None else constrain(x, self.x_specs, 0)

    @cached_property
    def _shapes(self) -> tuple[Any, Visit]:
        """Shapes of the parameters of a chunk, and of a visit."""
        work = Work(*(jnp.int32(0) for _ in Work._fields))
        return jax.eval_shape(lambda: (self.params(work), self.visit(work)))

    @cached_property
    def x_shapes(self) -> Any:
        """Shapes of what goes from chunk to chunk."""
        return jax.eval_shape(self.embed, self.shared, self._shapes[1])

    @cached_property
    def x_specs(self) -> Any:
        """How automatic axes split it: what has other dims than `Specs.x` names lies whole."""
        assert self.specs is not None
        spec = self.specs.x
        return jax.tree.map(
            lambda s: spec if s.ndim == len(spec) else PartitionSpec(), self.x_shapes
        )

    @cached_property
    def residuals(self) -> Residuals:
        """What a forward pass leaves to its backward pass."""
        return find_residuals(self.blocks, *self._shapes, self.x_shapes)

    @cached_property
    def halves(self) -> Halves:
        """A backward pass in two, of (parameters, visit) and (residuals, output's gradient)."""

        def backward(at_hand: Any, given: Any) -> tuple[Any, Any]:
            (params, visit), (residuals, dy) = at_hand, given
            grads, dx = self.residuals.backward(params, visit, residuals)(dy)
            return dx, carried(grads)

        return halve(backward, self._shapes, ([*self.residuals.shapes], self.x_shapes))

    def initial(self) -> State:
        """Empty buffers and sums."""
        slots, x = self.ticks.slots, self.x_shapes
        state = State(*(None for _ in State._fields))._replace(
            inputs=buffer(x, slots.inputs),
            sums=zeros(jax.eval_shape(self.head, self.shared, x, self._shapes[1])[1]),
        )
        if not self.ticks.trains:
            return state
        return state._replace(
            gradients=buffer(x, slots.gradients),
            residuals=buffer([*self.residuals.shapes], slots.residuals) if self.stashes else None,
            kept=buffer([*self.halves.kept], slots.kept) if slots.kept else None,
            chunk_grads=no_gradients(carried(self.chunk_params)),
            shared_grads=no_gradients(carried(self.shared)),
        )

    def split(self, state: State) -> State:
        """The state, laid out over automatic axes as parameters and activations are.

        Without it each microbatch's gradients would be gathered to be added up.
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
    """The visit with a key of its own for this part of the model."""
    if visit.key is None:
        return visit
    return visit._replace(key=jax.random.fold_in(visit.key, part))
