"""One executor for every schedule: a scan over its ticks, in every device of the stage axis.

Inside a `jax.shard_map` that is manual on the axis of the stages. All stages run one program, in
which a tick's tasks stand under conditionals: a stage without a task waits instead of computing.
Devices of one stage take the same branches, so that a layer may communicate over the other axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import permute
from jaxdist.parallel.pipeline.executor.backward import backward
from jaxdist.parallel.pipeline.executor.buffers import add, put, put_one, zeros
from jaxdist.parallel.pipeline.executor.parts import Found, Parts, Specs
from jaxdist.parallel.pipeline.executor.stage import Stage, State
from jaxdist.parallel.pipeline.executor.ticks import NONE, Lane, Ticks, Work


def run(
    ticks: Ticks,
    parts: Parts,
    chunk_params: Any,
    shared: Any,
    microbatches: Any,
    *,
    axis: str,
    key: jax.Array | None = None,
    specs: Specs | None = None,
) -> Found:
    """Loss and gradients of a batch, by a schedule; for use inside `jax.shard_map`.

    Sent: what goes between chunks, once for each microbatch and direction; at the end an all-reduce
    of the gradients of `shared` over the stages. A key gives the same masks by every schedule.

    Args:
      chunk_params: this stage's chunks, leaves `[chunks per stage, ...]` (`chunks.to_stages`).
      shared: parameters of embedding and head, the same on all stages.
      microbatches: leaves `[microbatches, ...]`, the same on all stages.
      axis: the mesh axis of the stages.
      key: of random layers.
      specs: needed where an automatic axis splits parameters: sums of gradients are split alike.
    """
    assert ticks.trains, ticks.name
    stage = Stage(ticks, parts, chunk_params, shared, microbatches, axis, key, specs)
    state = _scan(stage, _train)
    shared_grads, sums = lax.psum((state.shared_grads, state.sums), axis)
    return Found(state.chunk_grads, shared_grads, sums)


def evaluate(
    ticks: Ticks,
    parts: Parts,
    chunk_params: Any,
    shared: Any,
    microbatches: Any,
    *,
    axis: str,
    specs: Specs | None = None,
) -> Any:
    """The sums of a batch, by a schedule of forward tasks; arguments as for `run`."""
    assert not ticks.trains, ticks.name
    stage = Stage(ticks, parts, chunk_params, shared, microbatches, axis, None, specs)
    return lax.psum(_scan(stage, _evaluate).sums, axis)


def _scan(stage: Stage, tick: Callable[[Stage, State, Any], State]) -> State:
    """All ticks, each with this stage's entries of the tables."""
    ticks, here = stage.ticks, lax.axis_index(stage.axis)

    def mine(table: Any) -> jax.Array:
        return jnp.asarray(table)[:, here]

    tables = (
        *jax.tree.map(mine, (ticks.forward, ticks.backward)),
        [(mine(lane.slot), jnp.asarray(lane.used)) for lane in ticks.outputs],
        [(mine(lane.slot), jnp.asarray(lane.used)) for lane in ticks.cotangents],
    )

    def body(state: State, now: Any) -> tuple[State, None]:
        return stage.split(tick(stage, state, now)), None

    return lax.scan(body, stage.split(stage.initial()), tables)[0]


def _train(stage: Stage, state: State, tables: Any) -> State:
    """Forward, backward, transfers."""
    ahead, back, outputs, cotangents = tables
    state, y = _forward(stage, state, ahead)
    if stage.ticks.paired:
        state, _, dx = backward(stage, state, back, None)
    else:
        # What is sent before a backward task, a stage that has one would wait for: the others'
        # forward tasks. A stage has one or the other, so that y may pass through.
        state, y, dx = backward(stage, state, back, y)
    return state._replace(
        inputs=_send(stage, state.inputs, y, stage.ticks.outputs, outputs),
        gradients=_send(stage, state.gradients, dx, stage.ticks.cotangents, cotangents),
    )


def _evaluate(stage: Stage, state: State, tables: Any) -> State:
    """Forward, and the loss after the last chunk; transfers."""
    work, _, outputs, _ = tables

    def forward(sums: Any) -> tuple[Any, Any]:
        visit = stage.visit(work)
        y = stage.blocks(stage.params(work), stage.x(state.inputs, work, visit), visit)
        return y, lax.cond(
            work.chunk == stage.last,
            lambda sums: add(sums, stage.head(stage.shared, y, visit)[1]),
            lambda sums: sums,
            sums,
        )

    y, sums = lax.cond(
        work.kind != NONE, forward, lambda sums: (zeros(stage.x_shapes), sums), state.sums
    )
    inputs = _send(stage, state.inputs, y, stage.ticks.outputs, outputs)
    return state._replace(inputs=inputs, sums=sums)


def _forward(stage: Stage, state: State, work: Work) -> tuple[State, Any]:
    """The state after a forward task, if the tick has one, and the chunk's output."""

    def recompute() -> Any:
        visit = stage.visit(work)
        return stage.blocks(stage.params(work), stage.x(state.inputs, work, visit), visit)

    def stash(inputs: Any, residuals: Any) -> tuple[Any, Any, Any]:
        visit = stage.visit(work)
        x = stage.x(inputs, work, visit)
        y, leaves = stage.residuals.forward(stage.params(work), visit, x)
        slot = jnp.where(work.chunk == stage.last, work.input, NONE)
        return put(inputs, slot, y), put_one(residuals, work.residual, leaves), y

    nothing, runs = zeros(stage.x_shapes), work.kind != NONE
    if not stage.stashes:
        # Backward computes it again, and the last chunk's output goes nowhere else.
        return state, lax.cond(runs & (work.chunk != stage.last), recompute, lambda: nothing)
    inputs, residuals, y = lax.cond(
        runs, stash, lambda *held: (*held, nothing), state.inputs, state.residuals
    )
    return state._replace(inputs=inputs, residuals=residuals), y


def _send(
    stage: Stage, held: Any, value: Any, lanes: tuple[Lane, ...], now: list[tuple[Any, Any]]
) -> Any:
    """The buffer with what comes along each lane: `[stage] -> [stage + offset]`."""
    for lane, (slot, used) in zip(lanes, now, strict=True):

        def along(x: Any, lane: Lane = lane) -> Any:
            if not lane.offset:
                return x
            return jax.tree.map(lambda leaf: permute(leaf, stage.axis, lane.pairs), x)

        # All devices agree on whether a lane is used in a tick. Outside of a conditional the
        # transfer may go on while the tick's other task runs, which pays where most ticks have one.
        moved = lax.cond(used, along, zeros, value) if lane.rare else along(value)
        held = put(held, slot, moved)
    return held
