"""The backward tasks of a stage: whole, or the gradient of the input before that of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.models.layers import carried
from jaxdist.parallel.pipeline.executor.buffers import add, put, read, zeros
from jaxdist.parallel.pipeline.executor.parts import Visit
from jaxdist.parallel.pipeline.executor.stage import Stage, State
from jaxdist.parallel.pipeline.executor.ticks import KINDS, Work
from jaxdist.parallel.pipeline.schedules.schedule import Kind

Task = Callable[[Stage, State, Work], tuple[State, Any]]
"""To the state afterwards, and the gradient of the chunk's input."""


def backward(stage: Stage, state: State, work: Work, y: Any) -> tuple[State, Any, Any]:
    """The task that a tick has for this stage, if any.

    Args:
      y: what a stage without a task returns as it is, and one with a task as zeros.
    """
    kinds = [kind for kind in _TASKS if (stage.ticks.backward.kind == KINDS.index(kind)).any()]
    # The branch of each kind; no task, -1, has the last entry.
    branches = [kinds.index(kind) + 1 if kind in kinds else 0 for kind in KINDS] + [0]
    # These are read and not changed: what a conditional returns, it may have to copy.
    unchanged = {"inputs": state.inputs, "gradients": state.gradients}
    if not state.kept:
        unchanged["residuals"] = state.residuals

    def branch(task: Task) -> Callable[[State, Any], tuple[State, Any, Any]]:
        def taken(rest: State, y: Any) -> tuple[State, Any, Any]:
            after, dx = task(stage, rest._replace(**unchanged), work)
            return after._replace(**dict.fromkeys(unchanged)), zeros(y), dx

        return taken

    def wait(rest: State, y: Any) -> tuple[State, Any, Any]:
        return rest, y, zeros(stage.x_shapes)

    rest, y, dx = lax.switch(
        jnp.asarray(branches)[work.kind],
        [wait, *(branch(_TASKS[kind]) for kind in kinds)],
        state._replace(**dict.fromkeys(unchanged)),
        y,
    )
    return rest._replace(**unchanged), y, dx


def _full(stage: Stage, state: State, work: Work) -> tuple[State, Any]:
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


def _input(stage: Stage, state: State, work: Work) -> tuple[State, Any]:
    visit, params = stage.visit(work), stage.params(work)
    if stage.stashes:
        y, residuals = _stashed(state, work)
    else:
        x = stage.x(state.inputs, work, visit)
        y, residuals = stage.residuals.forward(params, visit, x)
    state, dy = _loss(stage, state, work, visit, y)
    dx, kept = stage.halves.first((params, visit), (residuals, dy))
    state = state._replace(kept=put(state.kept, work.kept, kept))
    return _embedding(stage, state, visit, dx), dx


def _weight(stage: Stage, state: State, work: Work) -> tuple[State, Any]:
    at_hand = (stage.params(work), stage.visit(work))
    grads = stage.halves.second(at_hand, read(state.kept, work.kept))
    return _add(state, work, grads), zeros(stage.x_shapes)


_TASKS: dict[Kind, Task] = {Kind.FULL: _full, Kind.INPUT: _input, Kind.WEIGHT: _weight}


def _stashed(state: State, work: Work) -> tuple[Any, list[jax.Array]]:
    """What the forward pass left: the output, of the last chunk alone, and the residuals."""
    return read(state.inputs, work.input), read(state.residuals, work.residual)


def _loss(stage: Stage, state: State, work: Work, visit: Visit, y: Any) -> tuple[State, Any]:
    """The gradient of a chunk's output: that of the loss, or what has arrived."""

    def last(grads: Any, sums: Any) -> tuple[Any, Any, Any]:
        gradient = jax.grad(stage.head, argnums=(0, 1), has_aux=True)
        (more, dy), own = gradient(stage.shared, y, visit)
        return add(grads, carried(more)), add(sums, own), dy

    def other(grads: Any, sums: Any) -> tuple[Any, Any, Any]:
        return grads, sums, read(state.gradients, work.gradient)

    grads, sums, dy = lax.cond(
        work.chunk == stage.last, last, other, state.shared_grads, state.sums
    )
    return state._replace(shared_grads=grads, sums=sums), dy


def _embedding(stage: Stage, state: State, visit: Visit, dx: Any) -> State:
    """With the gradient of the embedding, at the first chunk."""

    def first(grads: Any) -> Any:
        pull = jax.vjp(lambda shared: stage.embed(shared, visit), stage.shared)[1]
        return add(grads, carried(pull(dx)[0]))

    grads = lax.cond(visit.chunk == 0, first, lambda grads: grads, state.shared_grads)
    return state._replace(shared_grads=grads)


def _add(state: State, work: Work, grads: Any) -> State:
    def leaf(total: jax.Array, grad: jax.Array) -> jax.Array:
        if len(total) == 1:
            return total + grad.astype(total.dtype)[None]
        return total.at[work.local].add(grad.astype(total.dtype), mode="promise_in_bounds")

    return state._replace(chunk_grads=jax.tree.map(leaf, state.chunk_grads, carried(grads)))
