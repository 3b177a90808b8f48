"""Our schedules against those of torch.distributed.pipelining, which needs no processes here."""

import csv
import io

import pytest

from benchmarks.pipeline.torch_tables import PEERS, torch_schedule
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.csv_form import format_csv
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

TICKS = Costs(full=1.0)
"""Every task is one tick, as torch's own simulator counts."""
HALVES = Costs()


@pytest.mark.parametrize("microbatches_per_stage", [2, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", PEERS)
def test_no_longer_tick_for_tick(name, stages, microbatches_per_stage):
    microbatches = microbatches_per_stage * stages
    theirs = torch_schedule(PEERS[name], stages, microbatches)
    ours = PEERS[name].build(stages, microbatches)
    assert ours.placement == theirs.placement
    for costs in (TICKS, HALVES):
        our_time, their_time = simulate(ours, costs), simulate(theirs, costs)
        assert our_time.makespan <= their_time.makespan
        assert our_time.period <= their_time.period
        assert our_time.peak <= their_time.peak
        assert our_time.messages == their_time.messages


@pytest.mark.parametrize("name", PEERS)
def test_torch_reads_what_we_write(name):
    ours = PEERS[name].build(4, 8)
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
