"""The pipeline's race against torch: both sides run one model by one schedule, or do not race."""

from __future__ import annotations

import io
import json
import math
import os
import runpy
import sys

import jax
import numpy as np
import pytest
from bench_needs import needs_cores, needs_torch

from benchmarks.core import report as report_module
from benchmarks.core import team
from benchmarks.core.harness import Sample
from benchmarks.pipeline import race as pipeline_race
from benchmarks.zero import ours as zero_ours
from jaxdist.errors import RunError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.parallel.pipeline.executor.lower import typical_seconds

SAMPLES = {
    "ours alone": Sample((8.0, 8.0)),
    "torch alone": Sample((6.0, 6.0)),
    "ours gpipe": Sample((5.0, 5.0)),
    "torch gpipe": Sample((4.0, 4.0)),
    "ours 1f1b": Sample((8.0, 8.0)),
    "torch 1f1b": Sample((4.0, 4.0)),
    "ours interleaved": Sample((4.0, 4.0)),
    "torch interleaved": Sample((3.0, 3.0)),
}


def test_efficiency_is_half_the_time_of_one_process_over_the_pipelines():
    gpipe, speed, one_f_one_b, _, interleaved, _ = pipeline_race.figures(SAMPLES)
    assert (gpipe.ours, gpipe.reference, gpipe.goal, gpipe.holds) == (0.8, 0.75, ">= 1", True)
    assert gpipe.name == "pipeline efficiency, over torch GPipe"
    assert gpipe.ratio == pytest.approx(0.8 / 0.75)
    assert (speed.ours, speed.reference, speed.ratio, speed.holds) == (0.2, 0.25, 0.8, None)
    assert (one_f_one_b.ours, one_f_one_b.reference, one_f_one_b.holds) == (0.5, 0.75, False)
    assert (interleaved.ratio, interleaved.holds) == (1.0, True)


def test_absolute_times_stand_beside_the_efficiency():
    rows = {name: values for name, *values in pipeline_race.listing(SAMPLES).rows}
    assert rows["ours, GPipe"] == [5.0, 4.0, "0.800", "0.889"]
    assert rows["torch, Interleaved1F1B"] == [3.0, 3.0, "1.000", "0.941"]
    assert len(rows) == 6


def test_losses_that_do_not_agree_end_the_race():
    losses = dict.fromkeys(SAMPLES, 5.0)
    pipeline_race.check_losses(losses)
    message = r"3 steps torch 1f1b has loss 5\.01.* and ours alone 5\.00"
    with pytest.raises(RunError, match=message):
        pipeline_race.check_losses(losses | {"torch 1f1b": 5.01})


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(report_module, "find_spec", lambda _: None)
    report = pipeline_race.bench()
    assert math.isnan(report.figures[0].ours)
    assert report.figures[0].note == (
        "skipped: torch is not installed: pip install 'jaxdist[bench]'"
    )
    assert not report.listings
    monkeypatch.setattr(report_module, "find_spec", lambda _: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert "it needs 2 cores" in pipeline_race.bench().figures[0].note


@pytest.fixture
def small(monkeypatch, tmp_path):
    sizes = {"layers": 4, "embed": 32, "heads": 2, "mlp": 64, "vocab": 320}
    for name, value in (("SIZES", sizes), ("WINDOW", 16), ("MICROBATCHES", 4), ("ROWS", 1)):
        monkeypatch.setattr(pipeline_race, name, value)
    tokens = np.random.default_rng(0).integers(256, size=(4, 17))
    np.save(tmp_path / "tokens.npy", tokens)
    return tmp_path


def our_program(kind):
    config = ExperimentConfig.model_validate(pipeline_race.ours_config(kind))
    return build(config, devices=jax.devices()[: 1 if kind == "alone" else 2]).program


@pytest.mark.parametrize("kind", pipeline_race.PIPELINES)
@pytest.mark.every(3)
def test_our_stages_run_the_schedule_and_keep_activations(small, kind):
    ticks = our_program(kind).compute.ticks
    assert ticks.name == {"1f1b": "1f1b-eager"}.get(kind, kind)
    assert (ticks.stages, ticks.microbatches) == (2, 4)
    assert ticks.activations == "stash"
    assert ticks.chunks == (4 if kind == "interleaved" else 2)
    # Lock step makes no bubble longer than the schedule's own.
    seconds = ticks.seconds(typical_seconds("stash")) * 2 / ticks.chunks
    assert 4 * 3 / seconds == pytest.approx(4 / (4 + 2 / ticks.chunks))


def our_losses(directory, monkeypatch, orders):
    monkeypatch.setattr(sys, "stdin", io.StringIO(orders))
    answers = io.StringIO()
    zero_ours.serve(our_program("alone"), directory, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@needs_torch
@needs_cores
def test_torch_alone_and_in_stages_trains_what_ours_does(small, monkeypatch):
    hello, *mine = our_losses(small, monkeypatch, "1\n2\n")
    expected = [answer["loss"] for answer in mine]
    assert expected[1] < expected[0]
    for kind in ("alone", "interleaved"):
        commands = dict(pipeline_race.contenders(small))[f"torch {kind}"]
        with team.start(f"torch {kind}", commands, small) as them:
            assert {answer["params"] for answer in them.answers()} == {hello["params"]}
            found = [them.take_steps(steps)[1] for steps in (1, 2)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=kind)


def torch_side():
    return runpy.run_path(str(pipeline_race.TORCH / "__main__.py"), run_name="side")


@needs_torch
@pytest.mark.parametrize("chunks", [2, 4])
def test_torchs_chunks_are_the_model_cut(small, chunks):
    import torch

    side = torch_side()
    model = side["GPT"].Gpt(**pipeline_race.SIZES)
    tokens = torch.arange(12).reshape(2, 6)
    x = tokens
    parts = [side["Chunk"](model, index, chunks) for index in range(chunks)]
    assert [len(part.blocks) for part in parts] == [4 // chunks] * chunks
    for part in parts:
        x = part(x)
    torch.testing.assert_close(x, model(tokens))


def test_torchs_side_imports_nothing_of_ours():
    text = (pipeline_race.TORCH / "__main__.py").read_text()
    assert "jaxdist." not in text.replace("`benchmarks.pipeline.race`", "")


@needs_torch
@needs_cores
@pytest.mark.slow
def test_two_stages_race(small):
    report = pipeline_race.bench(repeats=1)
    assert len(report.figures) == 6
    assert all(figure.ours > 0 and figure.reference > 0 for figure in report.figures)
