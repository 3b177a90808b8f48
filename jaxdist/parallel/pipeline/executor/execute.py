"""The executor of all pipeline schedules: a scan over the ticks of a lowered schedule.

The executor runs inside a `jax.shard_map` that is manual on the stage axis. All stages run the same
program, in which conditionals choose the tasks of a tick. A stage without a task computes nothing
and waits. All devices of a stage take the same branches, so the layers inside a branch may call
collectives over other axes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.collectives.axis import permute
from jaxdist.parallel.pipeline.executor.backward import backward
from jaxdist.parallel.pipeline.executor.branches import (
    COTANGENTS,
    FORWARD,
    OUTPUTS,
    channel_scope,
    goes_forward,
    tick_scope,
)
from jaxdist.parallel.pipeline.executor.buffers import add, put, put_one, zeros
from jaxdist.parallel.pipeline.executor.model_fns import (
    Activation,
    GradientsAndSums,
    Sums,
)
from jaxdist.parallel.pipeline.executor.stage import StageContext, StageState
from jaxdist.parallel.pipeline.executor.ticks import NONE, Channel, TickTasks
from jaxdist.types import PyTree, TreeT


def run_pipeline(stage: StageContext) -> GradientsAndSums:
    """Compute the sums and gradients of a batch by a pipeline schedule, inside `jax.shard_map`.

    For each microbatch, an activation and later its gradient are sent once between consecutive
    chunks. After the last tick, the gradients of `shared` are all-reduced over the stages. With the
    same key, all schedules draw the same dropout masks. The schedule must have backward tasks.
    """
    assert stage.ticks.trains, stage.ticks.name
    state = _scan(stage, _train)
    # Only the stages of the first and of the last chunk have computed these gradients and sums. All
    # other stages have zeros.
    shared_grads, sums = lax.psum((state.shared_grads, state.sums), stage.axis)
    return GradientsAndSums(state.chunk_grads, shared_grads, sums)


def evaluate_pipeline(stage: StageContext) -> Sums:
    """Compute the sums of a batch in evaluation mode, inside `jax.shard_map`.

    The schedule must have forward tasks only.
    """
    assert not stage.ticks.trains, stage.ticks.name
    return lax.psum(_scan(stage, _evaluate).sums, stage.axis)


def _scan(
    stage: StageContext, tick: Callable[[StageContext, StageState, PyTree], StageState]
) -> StageState:
    """Run the function `tick` for each tick in sequence, and return the state after the last tick.

    The function gets the stage, the state, and the entries of the tables for this tick and stage.
    """
    ticks, here = stage.ticks, lax.axis_index(stage.axis)

    def mine(table: np.ndarray) -> jax.Array:
        return jnp.asarray(table)[:, here]

    tables = (
        *jax.tree.map(mine, (ticks.forward, ticks.backward)),
        [(mine(channel.slot), jnp.asarray(channel.used)) for channel in ticks.outputs],
        [(mine(channel.slot), jnp.asarray(channel.used)) for channel in ticks.cotangents],
    )

    def body(state: StageState, now: PyTree) -> tuple[StageState, None]:
        return stage.split(tick(stage, state, now)), None

    return lax.scan(body, stage.split(stage.initial()), tables)[0]


def _train(stage: StageContext, state: StageState, tables: PyTree) -> StageState:
    """Run a tick of training: a forward task, then a backward task, then transfers."""
    ahead, back, outputs, cotangents = tables
    state, y = _forward(stage, state, ahead)
    if stage.ticks.paired:
        state, _, dx = backward(stage, state, back, None)
    else:
        # `y` is passed through the backward task, which returns `y` or zeros, so that all transfers
        # run after both tasks. A transfer of `y` before the backward task would make a stage with
        # a backward task wait for the forward tasks of other stages. No output is lost: here no
        # stage has both tasks in one tick, so `y` is zeros on a stage with a backward task.
        state, y, dx = backward(stage, state, back, y)
    return state._replace(
        inputs=_send(stage, state.inputs, y, stage.ticks.outputs, outputs, OUTPUTS),
        gradients=_send(stage, state.gradients, dx, stage.ticks.cotangents, cotangents, COTANGENTS),
    )


def _evaluate(stage: StageContext, state: StageState, tables: PyTree) -> StageState:
    """Run a tick of evaluation: a forward task, then transfers.

    The forward task of the last chunk also computes the loss and adds its sums to the state.
    """
    work, _, outputs, _ = tables

    def forward(sums: Sums) -> tuple[Activation, Sums]:
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
    inputs = _send(stage, state.inputs, y, stage.ticks.outputs, outputs, OUTPUTS)
    return state._replace(inputs=inputs, sums=sums)


def _forward(stage: StageContext, state: StageState, work: TickTasks) -> tuple[StageState, PyTree]:
    """Run the forward task of a tick, and return the next state and the chunk's output.

    The output is zeros if the tick has no forward task, or if `goes_forward` says that the task
    computes nothing.
    """

    def recompute() -> Activation:
        visit = stage.visit(work)
        return stage.blocks(stage.params(work), stage.x(state.inputs, work, visit), visit)

    def stash(inputs: PyTree, residuals: PyTree) -> tuple[PyTree, PyTree, Activation]:
        visit = stage.visit(work)
        x = stage.x(inputs, work, visit)
        y, leaves = stage.residuals.forward(stage.params(work), visit, x)
        # Only the loss reads the output of a chunk again, so only the last chunk stores its output
        # (`backward._stashed`).
        slot = jnp.where(work.chunk == stage.last, work.input, NONE)
        return put(inputs, slot, y), put_one(residuals, work.residual, leaves), y

    nothing, runs = zeros(stage.x_shapes), goes_forward(stage.ticks, work)
    if not stage.stashes:
        with tick_scope(FORWARD):
            return state, lax.cond(runs, recompute, lambda: nothing)
    with tick_scope(FORWARD):
        inputs, residuals, y = lax.cond(
            runs, stash, lambda *held: (*held, nothing), state.inputs, state.residuals
        )
    return state._replace(inputs=inputs, residuals=residuals), y


def _send(
    stage: StageContext,
    held: TreeT,
    value: Activation,
    channels: tuple[Channel, ...],
    now: list[tuple[jax.Array, jax.Array]],
    name: str,
) -> TreeT:
    """Send a value on each channel, and return the buffer with the received values.

    Args:
      stage: the index of the stage on this device.
      held: the buffer for received values.
      value: the value that this stage sends.
      channels: the channels, which run in this order.
      now: for each channel, the slot for the value that this stage receives in this tick, and
        whether any stage receives a value.
      name: the kind of the value, `OUTPUTS` or `COTANGENTS`.
    """
    for channel, (slot, used) in zip(channels, now, strict=True):

        def along(x: Activation, channel: Channel = channel) -> Activation:
            if not channel.offset:
                return x
            return jax.tree.map(lambda leaf: permute(leaf, stage.axis, channel.pairs), x)

        # A collective in a conditional is safe here, since `used` is the same on all devices. But
        # only a transfer outside a conditional can overlap with the other task of the tick. The
        # transfer therefore runs in every tick, unless most ticks send nothing.
        with tick_scope(channel_scope(name, channel)):
            moved = lax.cond(used, along, zeros, value) if channel.rare else along(value)
        held = put(held, slot, moved)
    return held
