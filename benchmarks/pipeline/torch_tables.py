"""A comparison of simulated schedules, of jaxdist and of torch.distributed.pipelining.

torch makes its tables when a schedule is constructed, and reads few attributes of its stages, so
that stand-ins suffice and no process group is needed. The tables are read as text.
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.core.report import Figure, Sheet, lacking
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.csv_form import parse_csv
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

GOAL = "<= 1"
MODULE = "torch.distributed.pipelining.schedules"
SIZES = tuple((p, rounds * p) for p in (2, 3, 4, 8) for rounds in (2, 4))
COSTS = {"ticks": Costs(full=1.0), "halves": Costs()}
"""Costs with a whole backward task as one tick, as in torch's simulator, or as two ticks."""


class Peer(NamedTuple):
    """A schedule of torch, and the schedule of jaxdist of the same kind.

    Attributes:
      torch_name: the class in torch.
      build: a function from stages and microbatches to jaxdist's schedule.
      chunks: the number of chunks per stage.
      single: whether torch's class takes one stage object instead of a list of stage objects.
    """

    torch_name: str
    build: Callable[[int, int], Schedule]
    chunks: int = 1
    single: bool = False


PEERS = {
    "gpipe": Peer("ScheduleGPipe", gpipe, single=True),
    "1f1b": Peer("Schedule1F1B", one_f_one_b, single=True),
    "interleaved": Peer("ScheduleInterleaved1F1B", lambda p, m: interleaved(p, m, 2), 2),
    "breadth_first": Peer("ScheduleLoopedBFS", lambda p, m: breadth_first(p, m, 2), 2),
    "zb_h1": Peer("ScheduleInterleavedZeroBubble", zb_h1),
    "zb_v": Peer("ScheduleZBVZeroBubble", zb_v, 2),
    "dual_pipe_v": Peer("ScheduleDualPipeV", dual_pipe_v, 2),
}


class Versus(NamedTuple):
    """The size at which jaxdist's makespan is longest compared with torch's."""

    name: str
    torch_name: str
    sizes: int
    ours: float
    torch: float
    where: str

    @property
    def ratio(self) -> float:
        return self.ours / self.torch


def measure(sizes: Iterable[tuple[int, int]] = SIZES) -> list[Versus]:
    """Compare every schedule that jaxdist and torch both have, at its worst size.

    Without torch, the result is empty.
    """
    if lacking("torch"):
        return []
    grid = list(sizes)
    return [_worst(name, peer, grid) for name, peer in PEERS.items()]


def _worst(name: str, peer: Peer, sizes: Sequence[tuple[int, int]]) -> Versus:
    found = []
    for p, m in sizes:
        ours, theirs = peer.build(p, m), torch_schedule(peer, p, m)
        for how, costs in COSTS.items():
            our_time, their_time = (simulate(made, costs).makespan for made in (ours, theirs))
            where = f"p={p}, m={m}, {how}"
            found.append(Versus(name, peer.torch_name, len(sizes), our_time, their_time, where))
    return max(found, key=lambda one: one.ratio)


def torch_schedule(peer: Peer, stages: int, microbatches: int) -> Schedule:
    """Return torch's schedule, read from the text of its actions."""
    module: Any = importlib.import_module(MODULE)
    kind = getattr(module, peer.torch_name)
    held = [_stand_in(turn * stages, stages, peer.chunks) for turn in range(peer.chunks)]
    # Lowering to messages needs more of a stage than a stand-in has, and is not compared. `create`
    # allows for versions of torch that lack one of these functions.
    lower = mock.patch.object(kind, "_prepare_schedule_with_comms", create=True)
    compiled = mock.patch.object(module, "_check_torch_compile_compatibility", create=True)
    with lower, compiled:
        made = kind(held[0] if peer.single else held, microbatches, loss_fn=None)
    order = made._get_pipeline_order() if peer.single else made.pipeline_order
    text = io.StringIO()
    writer = csv.writer(text)
    for rank in range(stages):
        writer.writerow("" if action is None else str(action) for action in order[rank])
    return parse_csv(text.getvalue(), name=peer.torch_name)


def _stand_in(index: int, stages: int, chunks: int) -> SimpleNamespace:
    """Return the attributes that a schedule reads of a stage, for a stage of rank 0."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages * chunks,
        group_size=stages,
        group_rank=0,
        group=None,
        is_first=index == 0,
        is_last=index == stages * chunks - 1,
        has_backward=True,
        submod=None,
        device=None,
        stage_index_to_group_rank=None,
    )


def figures(found: Sequence[Versus]) -> list[Figure]:
    """Return the schedule whose makespan is longest relative to torch's; NaN without torch."""
    name = "makespan over torch's"
    if not found:
        return [Figure.skipped(name, lacking("torch"))]

    def note(worst: Versus) -> str:
        return (
            f"both simulated with the same times; the worst of {len(found)} schedules at "
            f"{worst.sizes} sizes is {worst.name}, {worst.where}"
        )

    return [Figure.worst(name, found, lambda one: (one.ours, one.torch), GOAL, "units", note)]


listing = Sheet[Versus](
    "makespan beside torch's, at the worst size",
    {
        "ours": "name",
        "torch's": lambda one: one.torch_name.removeprefix("Schedule"),
        "makespan": "ours",
        "of torch's": "torch",
        "ratio": lambda one: f"{one.ratio:.3f}",
    },
)
"""The listing of every schedule that jaxdist and torch both have."""
