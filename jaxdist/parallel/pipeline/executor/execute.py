"""The executor of every schedule: a scan over its ticks, on every device of the stage axis.

The executor runs inside a `jax.shard_map` that is manual on the axis of the stages. All stages run
the same program, in which conditionals choose a tick's tasks: a stage without a task computes
nothing and waits. The devices of a stage take the same branches, so that a layer may communicate
over other axes.
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
    ModelFns,
    StageSpecs,
    Sums,
)
from jaxdist.parallel.pipeline.executor.stage import StageContext, StageState
from jaxdist.parallel.pipeline.executor.ticks import NONE, Channel, Ticks, TickTasks
from jaxdist.types import Params, PyTree, TreeT


def run_pipeline(
    ticks: Ticks,
    model: ModelFns,
    chunk_params: Params,
    shared: Params,
    microbatches: PyTree,
    *,
    axis: str,
    key: jax.Array | None = None,
    specs: StageSpecs | None = None,
    frozen: tuple[Params, Params] = ((), ()),
) -> GradientsAndSums:
    """Compute loss and gradients of a batch, by a schedule; for use inside `jax.shard_map`.

    For each microbatch, activations and later their gradients are sent once between consecutive
    chunks. The gradients of `shared` are finally all-reduced over the stages. With the same key,
    all schedules draw the same dropout masks.

    Args:
      chunk_params: parameters of this stage's chunks, leaves `[chunks per stage, ...]`
        (`chunks.to_stages`).
      shared: parameters of embedding and head, the same on all stages.
      microbatches: leaves `[microbatches, ...]`, the same on all stages.
      axis: the mesh axis of the stages.
      key: random key of dropout and other random layers.
      specs: partition specs over automatic axes, which sums of gradients get too, or None if no
        automatic axis splits parameters.
      frozen: the frozen parameters of chunks, and of embedding and head, like `chunk_params` and
        `shared`.
    """
    assert ticks.trains, ticks.name
    stage = StageContext(ticks, model, chunk_params, shared, microbatches, axis, key, specs, frozen)
    state = _scan(stage, _train)
    # Only the stages of the first and the last chunk have added to these sums; other stages have
    # zeros.
    shared_grads, sums = lax.psum((state.shared_grads, state.sums), axis)
    return GradientsAndSums(state.chunk_grads, shared_grads, sums)


def evaluate_pipeline(
    ticks: Ticks,
    model: ModelFns,
    chunk_params: Params,
    shared: Params,
    microbatches: PyTree,
    *,
    axis: str,
    specs: StageSpecs | None = None,
    frozen: tuple[Params, Params] = ((), ()),
) -> Sums:
    """Compute the sums of a batch by forward tasks only; the arguments are as in `run_pipeline`."""
    assert not ticks.trains, ticks.name
    stage = StageContext(
        ticks, model, chunk_params, shared, microbatches, axis, None, specs, frozen
    )
    return lax.psum(_scan(stage, _evaluate).sums, axis)


def _scan(
    stage: StageContext, tick: Callable[[StageContext, StageState, PyTree], StageState]
) -> StageState:
    """Scan `tick` over all ticks, each with this stage's entries of the tables."""
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
    """Run a tick of training: a forward task, a backward task, then transfers."""
    ahead, back, outputs, cotangents = tables
    state, y = _forward(stage, state, ahead)
    if stage.ticks.paired:
        state, _, dx = backward(stage, state, back, None)
    else:
        # `y` passes through the backward task, which returns `y` or zeros, so that all transfers
        # come after both tasks. A transfer of `y` before the backward task would make a stage with
        # a backward task wait for the forward tasks of other stages. Nothing is lost, since here no
        # stage has both tasks in one tick: with a backward task, `y` is already zeros.
        state, y, dx = backward(stage, state, back, y)
    return state._replace(
        inputs=_send(stage, state.inputs, y, stage.ticks.outputs, outputs, OUTPUTS),
        gradients=_send(stage, state.gradients, dx, stage.ticks.cotangents, cotangents, COTANGENTS),
    )


def _evaluate(stage: StageContext, state: StageState, tables: PyTree) -> StageState:
    """Run a tick of evaluation: a forward task, the loss after the last chunk, then transfers."""
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
    """Run a tick's forward task, if any; return the next state and the chunk's output or zeros."""

    def recompute() -> Activation:
        visit = stage.visit(work)
        return stage.blocks(stage.params(work), stage.x(state.inputs, work, visit), visit)

    def stash(inputs: PyTree, residuals: PyTree) -> tuple[PyTree, PyTree, Activation]:
        visit = stage.visit(work)
        x = stage.x(inputs, work, visit)
        y, leaves = stage.residuals.forward(stage.params(work), visit, x)
        # Only the loss reads an output again: see `backward._stashed`.
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
    """Send `value` on each channel, and return the buffer with the values received."""
    for channel, (slot, used) in zip(channels, now, strict=True):

        def along(x: Activation, channel: Channel = channel) -> Activation:
            if not channel.offset:
                return x
            return jax.tree.map(lambda leaf: permute(leaf, stage.axis, channel.pairs), x)

        # A collective under a conditional is safe here, since all devices agree on `used`. But only
        # outside of a conditional can the transfer overlap with the tick's other task, so it runs
        # in every tick unless most ticks send nothing.
        with tick_scope(channel_scope(name, channel)):
            moved = lax.cond(used, along, zeros, value) if channel.rare else along(value)
        held = put(held, slot, moved)
    return held
