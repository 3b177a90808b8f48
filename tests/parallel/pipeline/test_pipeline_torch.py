"""Our schedules against those of torch.distributed.pipelining, which needs no processes here."""

import csv
import io
from types import SimpleNamespace
from unittest import mock

import pytest

from jaxdist.parallel.pipeline.costs import Costs
from jaxdist.parallel.pipeline.csv_form import format_csv, parse_csv
from jaxdist.parallel.pipeline.dual_pipe_v import dual_pipe_v
from jaxdist.parallel.pipeline.gpipe import gpipe
from jaxdist.parallel.pipeline.interleaved import breadth_first, interleaved
from jaxdist.parallel.pipeline.one_f_one_b import one_f_one_b
from jaxdist.parallel.pipeline.schedule import Schedule
from jaxdist.parallel.pipeline.simulate import simulate
from jaxdist.parallel.pipeline.zero_bubble import zb_h1
from jaxdist.parallel.pipeline.zero_bubble_v import zb_v

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

TICKS = Costs(full=1.0)
"""Every task is one tick, as torch's own simulator counts."""
HALVES = Costs()

CASES = {
    "ScheduleGPipe": (gpipe, 1),
    "Schedule1F1B": (one_f_one_b, 1),
    "ScheduleInterleaved1F1B": (lambda p, m: interleaved(p, m, chunks=2), 2),
    "ScheduleLoopedBFS": (lambda p, m: breadth_first(p, m, chunks=2), 2),
    "ScheduleInterleavedZeroBubble": (zb_h1, 1),
    "ScheduleZBVZeroBubble": (zb_v, 2),
    "ScheduleDualPipeV": (dual_pipe_v, 2),
}


def stand_in(index, rank, stages, chunks):
    """What a schedule asks a torch stage for."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages * chunks,
        group_size=stages,
        group_rank=rank,
        group=None,
        is_first=index == 0,
        is_last=index == stages * chunks - 1,
        has_backward=True,
        submod=None,
        device=None,
        stage_index_to_group_rank=None,
    )


def renumbered(action):
    """torch 2.13's table of 1F1B counts the last rank's forwards from 1; its execution does not."""
    if action is None or action.computation_type != torch_schedules.FORWARD:
        return action
    return action._replace(microbatch_index=action.microbatch_index - 1)


def torch_order(name, stages, microbatches, chunks):
    """torch's table, through the text of its actions."""
    cls = getattr(torch_schedules, name)
    held = [stand_in(turn * stages, 0, stages, chunks) for turn in range(chunks)]
    single = chunks == 1 and name in ("ScheduleGPipe", "Schedule1F1B")
    # Lowering to messages needs more of a stage, and is not compared.
    lower = mock.patch.object(cls, "_prepare_schedule_with_comms", create=True)
    compiled = mock.patch.object(torch_schedules, "_check_torch_compile_compatibility")
    with lower, compiled:
        schedule = cls(held[0] if single else held, microbatches, loss_fn=None)
    order = schedule._get_pipeline_order() if single else schedule.pipeline_order
    text = io.StringIO()
    writer = csv.writer(text)
    for rank in range(stages):
        actions = list(order[rank])
        if name == "Schedule1F1B" and rank == stages - 1:
            actions = [renumbered(action) for action in actions]
        writer.writerow("" if action is None else str(action) for action in actions)
    return parse_csv(text.getvalue(), name=name)


@pytest.mark.parametrize("microbatches_per_stage", [2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_no_longer_tick_for_tick(name, stages, microbatches_per_stage):
    build, chunks = CASES[name]
    microbatches = microbatches_per_stage * stages
    theirs = torch_order(name, stages, microbatches, chunks)
    ours = build(stages, microbatches)
    assert ours.placement == theirs.placement
    for costs in (TICKS, HALVES):
        our_time, their_time = simulate(ours, costs), simulate(theirs, costs)
        assert our_time.makespan <= their_time.makespan
        assert our_time.period <= their_time.period
        assert our_time.peak <= their_time.peak
        assert our_time.messages == their_time.messages


@pytest.mark.parametrize("name", CASES)
def test_torch_reads_what_we_write(name):
    ours = CASES[name][0](4, 8)
    for row, line in zip(ours.rows, csv.reader(io.StringIO(format_csv(ours))), strict=True):
        actions = [torch_schedules._Action.from_str(cell) for cell in line]
        assert [str(action) for action in actions] == [str(task) for task in row]


def test_torch_accepts_our_order():
    """Its own check of an order, on one schedule that it has not."""
    ours: Schedule = zb_v(4, 8)
    orders = {
        rank: [torch_schedules._Action.from_str(str(task)) for task in row]
        for rank, row in enumerate(ours.rows)
    }
    assert torch_schedules._validate_schedule(orders, 4, 8, 8)
