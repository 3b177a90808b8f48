"""Which branch of each conditional a stage takes in a tick: for the executor, and for predictions.

A conditional that a tick decides stands in a named scope, `tick(FORWARD)` and so on. The scopes
that enclose it, one in another, are its name in the compiled program: "forward", "backward/last".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np

from jaxdist.hlo.lockstep import SCOPE, Decision, Lockstep
from jaxdist.parallel.pipeline.executor.ticks import KINDS, NONE, Channel, Entries, Ticks, Work
from jaxdist.pipeline_schedules.schedule import TaskKind

FORWARD, BACKWARD = "forward", "backward"
FIRST, LAST, CHUNK, LAYER = "first", "last", "chunk", "layer"
OUTPUTS, COTANGENTS = "outputs", "cotangents"


def tick(name: str) -> AbstractContextManager[object]:
    """The named scope of a conditional that a tick decides."""
    return jax.named_scope(SCOPE + name)


def goes_forward(ticks: Ticks, work: Work) -> Entries:
    """Whether a forward task computes anything.

    With recomputation that of the last chunk does not: its output is only used by the loss, which
    the backward task takes of the output that it recomputes.
    """
    runs = work.kind != NONE
    return runs if ticks.activations == "stash" else runs & (work.chunk != ticks.chunks - 1)


def backward_kinds(ticks: Ticks) -> tuple[TaskKind, ...]:
    """The kinds of backward tasks that a schedule has: the branches, after the one that waits."""
    return tuple(kind for kind in KINDS[1:] if (ticks.backward.kind == KINDS.index(kind)).any())


def backward_branches(ticks: Ticks) -> np.ndarray:
    """int32 `[kinds + 1]`: the branch of each of `KINDS`, at the end that of no task (kind -1)."""
    kinds = backward_kinds(ticks)
    found = [kinds.index(kind) + 1 if kind in kinds else 0 for kind in KINDS]
    return np.array([*found, 0], np.int32)


def channel_scope(channels: str, channel: Channel) -> str:
    """The scope of a channel that is rare: "outputs_-1"."""
    return f"{channels}_{channel.offset}"


def lockstep(ticks: Ticks, layers: Sequence[int]) -> Lockstep:
    """The branches that each stage takes, tick by tick, under the names of their conditionals.

    Args:
      layers: of each chunk; all loop over as many as the largest has, and skip those they have not.
    """
    ahead, back = ticks.forward, ticks.backward
    shares = np.array(layers) / max(layers)
    decisions = {
        FORWARD: Decision(2, goes_forward(ticks, ahead)),
        BACKWARD: Decision(1 + len(backward_kinds(ticks)), backward_branches(ticks)[back.kind]),
        f"{BACKWARD}/{LAST}": Decision(2, back.chunk == ticks.chunks - 1),
    }
    for outer, work in ((FORWARD, ahead), (BACKWARD, back)):
        decisions[f"{outer}/{FIRST}"] = Decision(2, work.chunk == 0)
        chunk = np.maximum(work.chunk, 0)
        decisions[f"{outer}/{CHUNK}"] = Decision(ticks.chunks, chunk)
        decisions[f"{outer}/{LAYER}"] = Decision(2, shares[chunk])
    for name, channels in ((OUTPUTS, ticks.outputs), (COTANGENTS, ticks.cotangents)):
        for channel in channels:
            used = np.broadcast_to(channel.used[:, None], channel.slot.shape)
            decisions[channel_scope(name, channel)] = Decision(2, used)
    return Lockstep(ticks.name, decisions)
