"""The bench of pipeline schedules: goals, the worst is found, threads keep every dependency."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

import benchmarks as benches
from benchmarks.core import report
from benchmarks.pipeline import auto as pipeline_auto
from benchmarks.pipeline import formulas as pipeline_formulas
from benchmarks.pipeline import memory as pipeline_memory
from benchmarks.pipeline import pod as pipeline_pod
from benchmarks.pipeline import race as pipeline_race
from benchmarks.pipeline import report as pipeline
from benchmarks.pipeline import sleep as pipeline_sleep
from benchmarks.pipeline import threads as pipeline_threads
from benchmarks.pipeline import torch_tables as pipeline_torch
from benchmarks.pipeline import work as pipeline_work
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.build import PipelineScheduleConfig
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import needs
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

SMALL = pipeline_formulas.sizes((1, 2, 4))
BUILDS = {
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}


def kinds():
    union = get_args(PipelineScheduleConfig)[0]
    return {kind.model_fields["type"].default for kind in get_args(union)}


def test_every_schedule_with_a_formula_is_held_to_it():
    assert set(pipeline_formulas.LAWS) == kinds() - {"csv", "zb_auto"}


def test_the_grid():
    sizes = pipeline_formulas.sizes()
    assert max(p for p, _ in sizes) == 32
    assert max(m for _, m in sizes) == 256
    assert (32, 256) in sizes


def test_simulation_equals_the_formulas():
    held = pipeline_formulas.measure(grid=SMALL)
    assert all(one.sizes and one.bubble.apart == 1 for one in held)
    assert {one.name for one in held if one.peak is None} == {"v_min"}
    assert all(one.peak.apart == 1 for one in held if one.peak)
    found = pipeline_formulas.figures(held)
    assert [(f.name, f.goal, f.ratio, f.holds) for f in found] == [
        ("bubble over its formula", "<= 1", 1, True),
        ("peak over its formula", "<= 1", 1, True),
    ]
    rows = pipeline_formulas.listing(held).rows
    assert [row[0] for row in rows] == list(pipeline_formulas.LAWS)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_schedule_apart_from_its_formula_is_the_worst(factor):
    laws = {name: pipeline_formulas.LAWS[name] for name in ("gpipe", "1f1b")}
    law = laws["1f1b"]

    def wrong(p, times):
        return law.bubble(p, times) * (factor if p == 2 else 1)

    held = pipeline_formulas.measure({**laws, "1f1b": law._replace(bubble=wrong)}, SMALL)
    bubble, peak = pipeline_formulas.figures(held)
    assert (bubble.ratio, bubble.holds, peak.holds) == (2, False, True)
    assert "the worst of 2 schedules is 1f1b, p=2, m=8" in bubble.note


def test_a_bubble_where_there_should_be_none_is_no_success():
    """zb_v's formula is 0, and a ratio to 0 must not pass for 1."""
    law = pipeline_formulas.LAWS["zb_v"]._replace(times=(3, 4, 2))
    held = pipeline_formulas.measure({"zb_v": law}, SMALL)
    bubble, _ = pipeline_formulas.figures(held)
    assert (bubble.ratio, bubble.holds) == (math.inf, False)


def test_zb_auto_beside_the_goal_and_the_paper():
    autos = pipeline_auto.measure(stages=(2, 4), models=("1.5B, 32",))
    assert [one.memory for one in autos] == [2.0] * 6 + [1.0, 2.0]
    found = pipeline_auto.figures(autos)
    assert [(f.name, f.goal, f.holds) for f in found] == [
        ("zb_auto, bubble in 2x 1F1B's memory", "<= 1", True),
        ("zb_auto, bubble over the paper's", "<= 1", True),
        ("zb_auto, peak over its limit", "<= 1", True),
    ]
    assert found[0].reference == 1
    assert found[1].reference in (12.425, 0.395)
    assert found[0].ours == max(one.bubble_percent for one in autos[:6])
    assert [row[-1] for row in pipeline_auto.listing(autos).rows] == [None] * 6 + [12.42, 0.39]


def test_without_torch_a_figure_says_why(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    found = pipeline_torch.measure()
    assert found == []
    [figure] = pipeline_torch.figures(found)
    assert math.isnan(figure.ours)
    assert (figure.goal, figure.holds) == ("", None)
    assert figure.note == "skipped: torch is not installed: pip install 'jaxdist[bench]'"


def test_no_longer_than_torch():
    pytest.importorskip("torch.distributed.pipelining.schedules")
    found = pipeline_torch.measure([(2, 4), (4, 8)])
    assert [one.name for one in found] == list(pipeline_torch.PEERS)
    assert all(one.ratio <= 1 and one.sizes == 2 for one in found)
    [figure] = pipeline_torch.figures(found)
    assert (figure.name, figure.goal, figure.holds) == ("makespan over torch's", "<= 1", True)
    assert len(pipeline_torch.listing(found).rows) == len(found)


def test_a_schedule_longer_than_torchs_is_the_worst(monkeypatch):
    pytest.importorskip("torch.distributed.pipelining.schedules")
    peers = dict(pipeline_torch.PEERS)
    peers["zb_h1"] = peers["zb_h1"]._replace(build=one_f_one_b)
    monkeypatch.setattr(pipeline_torch, "PEERS", peers)
    [figure] = pipeline_torch.figures(pipeline_torch.measure([(4, 8)]))
    assert figure.holds is False
    assert "zb_h1, p=4, m=8, halves" in figure.note


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_threads_follow_the_rows_and_wait_for_what_they_need(name, transfer):
    made, unit_seconds = BUILDS[name](4, 8), 1e-3
    rows = pipeline_threads.play(made, Costs(transfer=transfer), unit_seconds)
    assert [tuple(span.task for span in row) for row in rows] == [
        made.tasks(stage) for stage in range(made.stages)
    ]
    ends = {span.task: span.end for row in rows for span in row}
    for row in rows:
        for before, after in pairwise(row):
            assert after.start >= before.end
        for span in row:
            for need in needs(span.task, made.chunks):
                if need in ends:
                    away = made.placement[need.chunk] != made.placement[span.task.chunk]
                    arrives = ends[need] + transfer * unit_seconds * away
                    assert span.start >= arrives - 1e-9, (span, need)


def test_threads_refuse_what_would_wait_for_ever():
    rows = ((Task(TaskKind.FULL, 0, 0), Task(TaskKind.FORWARD, 0, 0)),)
    with pytest.raises(ConfigError, match="0B0 needs 0F0, which comes after it"):
        pipeline_threads.play(Schedule("stuck", microbatches=1, placement=(0,), rows=rows))


def test_the_slowest_threads_are_shown():
    played = [
        pipeline_threads.Played("1f1b", 4, 8, 1.2, 1.0),
        pipeline_threads.Played("zb_v", 4, 8, 1.1, 1.0),
        pipeline_threads.Played("zb_v", 8, 16, 1.04, 1.0),
    ]
    found = pipeline_threads.figures(played)
    assert [(f.name, f.goal, f.ratio, f.holds) for f in found] == [
        ("wall time over simulated, 4 threads", "<= 1.05", 1.2, False),
        ("wall time over simulated, 8 threads", "<= 1.05", 1.04, True),
    ]
    assert found[0].note.endswith("the worst of 2 schedules is 1f1b")
    assert [row[-1] for row in pipeline_threads.listing(played).rows] == ["1.200", "1.100", "1.040"]


def test_threads_are_measured_beside_their_simulation():
    played = pipeline_threads.measure((2,), unit_seconds=1e-4, repeats=1)
    assert [(one.name, one.stages, one.microbatches) for one in played] == [
        ("1f1b", 2, 4),
        ("zb_h1", 2, 4),
        ("zb_v", 2, 4),
    ]
    makespan = simulate(one_f_one_b(2, 4), pipeline_threads.COSTS).makespan
    assert played[0].simulated_seconds == pytest.approx(makespan * 1e-4)
    # A sleep is never shorter than asked for, so that threads are never ahead of the simulation.
    assert all(one.ratio > 1 - 1e-6 for one in played)


def test_the_report(monkeypatch, tmp_path):
    """The parts in order; one that could not be measured has no table."""
    laws = {"gpipe": pipeline_formulas.LAWS["gpipe"]}
    autos = pipeline_auto.measure((2,), ("1.5B, 32",))
    held, played = (
        pipeline_formulas.measure(laws, SMALL),
        [pipeline_threads.Played("1f1b", 4, 8, 1.0, 1.0)],
    )
    work = pipeline_work.WorkCell("stash", 4, 4, 1.0, 2.0, 1.0, 48, 84, 48, (1.0,), (2.0,))
    memory = pipeline_memory.MemoryCell("gpipe", "stash", 4, 8, 1.0)
    for part, found in (
        (pipeline_formulas, held),
        (pipeline_auto, autos),
        (pipeline_torch, []),
        (pipeline_threads, played),
        (pipeline_sleep, [pipeline_sleep.Slept("1f1b", 4, 8, 22, 1.0, 1.0, 0.9)]),
        (pipeline_work, [work]),
        (pipeline_memory, [memory, replace(memory, name="1f1b")]),
        (pipeline_race, {}),
        (pipeline_pod, []),
    ):
        monkeypatch.setattr(part, "measure", lambda found=found: found)
    report = benches.run("pipeline", tmp_path / "report.json")
    assert report.bench == "pipeline"
    assert [figure.name for figure in report.figures] == [
        "bubble over its formula",
        "peak over its formula",
        "zb_auto, bubble in 2x 1F1B's memory",
        "zb_auto, bubble over the paper's",
        "zb_auto, peak over its limit",
        "makespan over torch's",
        "wall time over simulated, 4 threads",
        "wall time over lock step, 4 stages",
        "executed FLOPs over the model's",
        "executed passes over the model's",
        "step time over the usual scan's, stash",
        "1F1B's memory as microbatches grow",
        "GPipe's memory as microbatches grow",
        "pipeline efficiency over torch's",
        "pod program",
    ]
    assert len(report.listings) == 6
    assert (tmp_path / "report.json").stat().st_size
    assert benches.BENCHES["pipeline"] == f"{pipeline.__name__}:bench"


def test_gpipe_of_one_stage_has_no_bubble():
    """Equal zeros are equal."""
    law = pipeline_formulas.Law(gpipe, lambda p, t: 0, lambda p, m: m)
    assert pipeline_formulas.hold("gpipe", law, [(1, 3)]).bubble.apart == 1
