"""The backward tasks of a pipeline stage, as parts of the traced program.

A FULL task is the whole backward pass of a chunk. An INPUT task and a WEIGHT task are its halves.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.models.layers import carried
from jaxdist.parallel.pipeline.executor.branches import (
    BACKWARD,
    FIRST,
    LAST,
    backward_branches,
    backward_kinds,
    tick_scope,
)
from jaxdist.parallel.pipeline.executor.buffers import add, put, read_slot, zeros
from jaxdist.parallel.pipeline.executor.model_fns import Activation, Sums, Visit
from jaxdist.parallel.pipeline.executor.stage import StageContext, StageState
from jaxdist.parallel.pipeline.executor.ticks import TickTasks
from jaxdist.pipeline_schedules.schedule import TaskKind
from jaxdist.types import Grads

BackwardTask = Callable[[StageContext, StageState, TickTasks], tuple[StageState, Activation]]
"""A function of a stage, its state and the entries of the tables for this tick. The function
returns the next state and the gradient of the chunk's input."""


def backward(
    stage: StageContext, state: StageState, work: TickTasks, y: Activation
) -> tuple[StageState, Activation, Activation]:
    """Run the backward task of a stage in a tick, if the stage has a backward task in this tick.

    Args:
      stage: the index of the stage on this device.
      state: the state of the stage.
      work: the entries of the backward table for this tick and stage.
      y: the output of the tick's forward task, or None. `execute._train` explains why `y` is passed
        through this function.

    Returns:
      The next state, then `y`, and the gradient of the chunk's input. With a backward task, zeros
      take the place of `y`. Without a backward task, the gradient consists of zeros.
    """
    # Backward tasks only read these buffers. The buffers are closed over instead of passed through
    # the conditional, since XLA may copy the results of a conditional.
    unchanged = {name: getattr(state, name) for name in ("inputs", "gradients", "residuals")}

    def branch(
        task: BackwardTask,
    ) -> Callable[[StageState, Activation], tuple[StageState, Activation, Activation]]:
        def taken(rest: StageState, y: Activation) -> tuple[StageState, Activation, Activation]:
            after, dx = task(stage, rest._replace(**unchanged), work)
            return after._replace(**dict.fromkeys(unchanged)), zeros(y), dx

        return taken

    def wait(rest: StageState, y: Activation) -> tuple[StageState, Activation, Activation]:
        return rest, y, zeros(stage.x_shapes)

    with tick_scope(BACKWARD):
        rest, y, dx = lax.switch(
            jnp.asarray(backward_branches(stage.ticks))[work.kind],
            [wait, *(branch(_TASKS[kind]) for kind in backward_kinds(stage.ticks))],
            state._replace(**dict.fromkeys(unchanged)),
            y,
        )
    return rest._replace(**unchanged), y, dx


def _full(stage: StageContext, state: StageState, work: TickTasks) -> tuple[StageState, Activation]:
    """Compute the gradients of a chunk's input and weights.

    The task reads the stored residuals, or recomputes the forward pass from the chunk's input.
    """
    visit, params = stage.visit(work), stage.params(work)
    if stage.stashes:
        y, residuals = _stashed(state, work)
        pull = stage.residuals.backward(params, visit, residuals)
    else:
        x = stage.x(state.inputs, work, visit)
        y, pull = jax.vjp(lambda params, x: stage.blocks(params, x, visit), params, x)
    state, dy = _loss(stage, state, work, visit, y)
    grads, dx = pull(dy)
    return _embedding(stage, _add(state, work, grads), visit, dx), dx


def _input(
    stage: StageContext, state: StageState, work: TickTasks
) -> tuple[StageState, Activation]:
    """Compute the gradient of a chunk's input, and store the values that the WEIGHT task needs."""
    visit, params = stage.visit(work), stage.params(work)
    if stage.stashes:
        y, residuals = _stashed(state, work)
    else:
        x = stage.x(state.inputs, work, visit)
        y, residuals = stage.residuals.forward(params, visit, x)
    state, dy = _loss(stage, state, work, visit, y)
    dx, kept = stage.split_backward.b((params, visit), (residuals, dy))
    state = state._replace(kept=put(state.kept, work.kept, kept))
    return _embedding(stage, state, visit, dx), dx


def _weight(
    stage: StageContext, state: StageState, work: TickTasks
) -> tuple[StageState, Activation]:
    """Compute the gradients of a chunk's weights from the values that the INPUT task stored.

    In place of the gradient of the chunk's input, which the INPUT task has computed, zeros are
    returned.
    """
    at_hand = (stage.params(work), stage.visit(work))
    grads = stage.split_backward.w(at_hand, read_slot(state.kept, work.kept))
    return _add(state, work, grads), zeros(stage.x_shapes)


_TASKS: dict[TaskKind, BackwardTask] = {
    TaskKind.FULL: _full,
    TaskKind.INPUT: _input,
    TaskKind.WEIGHT: _weight,
}


def _stashed(state: StageState, work: TickTasks) -> tuple[Activation, list[jax.Array]]:
    """Return a chunk's output and its residuals.

    The output is valid only for the last chunk. `_loss` reads the output of no other chunk.
    """
    return read_slot(state.inputs, work.input), read_slot(state.residuals, work.residual)


def _loss(
    stage: StageContext, state: StageState, work: TickTasks, visit: Visit, y: Activation
) -> tuple[StageState, Activation]:
    """Return the next state and the gradient of a chunk's output.

    For the last chunk the head computes this gradient, and the head's gradients and sums are added
    to the state. For other chunks this gradient is the gradient that the stage received.
    """

    def last(grads: Grads, sums: Sums) -> tuple[Grads, Sums, Activation]:
        gradient = jax.grad(stage.head, argnums=(0, 1), has_aux=True)
        (more, dy), own = gradient(stage.shared, y, visit)
        return add(grads, carried(more)), add(sums, own), dy

    def other(grads: Grads, sums: Sums) -> tuple[Grads, Sums, Activation]:
        return grads, sums, read_slot(state.gradients, work.gradient)

    with tick_scope(LAST):
        grads, sums, dy = lax.cond(
            work.chunk == stage.last, last, other, state.shared_grads, state.sums
        )
    return state._replace(shared_grads=grads, sums=sums), dy


def _embedding(stage: StageContext, state: StageState, visit: Visit, dx: Activation) -> StageState:
    """Add the gradients of the embedding to the state if the chunk is the model's first chunk."""

    def first(grads: Grads) -> Grads:
        pull = jax.vjp(lambda shared: stage.embed(shared, visit), stage.shared)[1]
        return add(grads, carried(pull(dx)[0]))

    with tick_scope(FIRST):
        grads = lax.cond(visit.chunk == 0, first, lambda grads: grads, state.shared_grads)
    return state._replace(shared_grads=grads)


def _add(state: StageState, work: TickTasks, grads: Grads) -> StageState:
    def leaf(total: jax.Array, grad: jax.Array) -> jax.Array:
        # A dynamic index into an array with a single chunk could copy the array.
        if len(total) == 1:
            return total + grad.astype(total.dtype)[None]
        # The index is from the schedule's table, so XLA need not clamp it.
        return total.at[work.local].add(grad.astype(total.dtype), mode="promise_in_bounds")

    return state._replace(chunk_grads=jax.tree.map(leaf, state.chunk_grads, carried(grads)))
