"""The branch that each conditional of a pipeline's program takes in each tick.

The executor uses these branches, and so does the prediction of a step's time. A conditional that
depends on the tick is in a named scope, such as `tick_scope(FORWARD)`. The names of the enclosing
scopes identify the conditional in the compiled program: "forward", "backward/last".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np

from jaxdist.hlo.lockstep import SCOPE, ConditionalDecision, Lockstep
from jaxdist.parallel.pipeline.executor.ticks import KINDS, NONE, Channel, Entries, Ticks, TickTasks
from jaxdist.pipeline_schedules.schedule import TaskKind

FORWARD, BACKWARD = "forward", "backward"
FIRST, LAST, CHUNK, LAYER = "first", "last", "chunk", "layer"
OUTPUTS, COTANGENTS = "outputs", "cotangents"


def tick_scope(name: str) -> AbstractContextManager[object]:
    """Return the named scope of a conditional that depends on the tick."""
    return jax.named_scope(SCOPE + name)


def goes_forward(ticks: Ticks, work: TickTasks) -> Entries:
    """Return whether the forward task of each tick and stage computes anything.

    Without a forward task nothing is computed. With recomputation the forward task of the last
    chunk computes nothing either: only the loss uses the output of this chunk, and the backward
    task recomputes that output.
    """
    runs = work.kind != NONE
    return runs if ticks.activations == "stash" else runs & (work.chunk != ticks.chunks - 1)


def backward_kinds(ticks: Ticks) -> tuple[TaskKind, ...]:
    """Return the kinds of backward tasks that a schedule has, in the order of their branches.

    Branch 0 is for a stage without a backward task. The first of these kinds has branch 1.
    """
    return tuple(kind for kind in KINDS[1:] if (ticks.backward.kind == KINDS.index(kind)).any())


def backward_branches(ticks: Ticks) -> np.ndarray:
    """Return the branch of each kind in `KINDS`, then the branch of no task, int32 `[kinds + 1]`.

    Branch 0 is for a stage without a task, and for kinds that the schedule does not have.
    """
    # `NONE` is -1, so a lookup of no task finds the last entry.
    kinds = backward_kinds(ticks)
    found = [kinds.index(kind) + 1 if kind in kinds else 0 for kind in KINDS]
    return np.array([*found, 0], np.int32)


def channel_scope(channels: str, channel: Channel) -> str:
    """Return the name of the scope of a channel's transfer, such as "outputs_-1".

    Args:
      channels: `OUTPUTS` or `COTANGENTS`.
      channel: the channel whose transfer gets the name.
    """
    return f"{channels}_{channel.offset}"


def lockstep(ticks: Ticks, layers: Sequence[int]) -> Lockstep:
    """Return the branches of all conditionals that depend on the tick, for each tick and stage.

    Args:
      ticks: the lowered schedule.
      layers: the number of layers of each chunk. All chunks loop over the largest number, and a
        chunk with fewer layers skips the last iterations.
    """
    ahead, back = ticks.forward, ticks.backward
    shares = np.array(layers) / max(layers)
    decisions = {
        FORWARD: ConditionalDecision(2, goes_forward(ticks, ahead)),
        BACKWARD: ConditionalDecision(
            1 + len(backward_kinds(ticks)), backward_branches(ticks)[back.kind]
        ),
        f"{BACKWARD}/{LAST}": ConditionalDecision(2, back.chunk == ticks.chunks - 1),
    }
    for outer, work in ((FORWARD, ahead), (BACKWARD, back)):
        decisions[f"{outer}/{FIRST}"] = ConditionalDecision(2, work.chunk == 0)
        chunk = np.maximum(work.chunk, 0)
        decisions[f"{outer}/{CHUNK}"] = ConditionalDecision(ticks.chunks, chunk)
        decisions[f"{outer}/{LAYER}"] = ConditionalDecision(2, shares[chunk])
    for name, channels in ((OUTPUTS, ticks.outputs), (COTANGENTS, ticks.cotangents)):
        for channel in channels:
            used = np.broadcast_to(channel.used[:, None], channel.slot.shape)
            decisions[channel_scope(name, channel)] = ConditionalDecision(2, used)
    return Lockstep(ticks.name, decisions)
