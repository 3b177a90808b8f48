"""`jaxdist study review`: the page, its figures, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxdist.errors import ConfigError
from jaxdist.simulation.choice import MODELS, Speeds, server_seconds
from jaxdist.simulation.review.efficiency import busiest_card_seconds, curves
from jaxdist.simulation.review.optimizers import optimizer_rows
from jaxdist.simulation.review.page import run_review
from jaxdist.simulation.review.patterns import zero_bytes
from jaxdist.simulation.review.settings import ReviewConfig, read_review

PROGRAM = """
model: {type: mlp, hidden: [16]}
data: {type: synthetic, kind: images, height: 4, width: 4, channels: 1}
optim: {type: adamw, learning_rate: 0.001}
train: {batch_size: 8, steps: 2}
mesh: {data: 2, fake_devices: 2}
"""
REVIEW = """
devices: [32, 2]
program: program.yaml
patterns: {all-reduce: []}
scaling:
  source: two runs
  metric: loss
  batches: [32, 64, 128]
  cells:
    sgd: [{mean: 0.5, spread: 0.1}, {mean: 0.502}, {mean: 0.6, spread: 0.2}]
    adamw: [{mean: 0.504}, {mean: null}, {mean: 0.5}]
"""


def written(folder: Path) -> str:
    (folder / "program.yaml").write_text(PROGRAM)
    (folder / "review.yaml").write_text(REVIEW)
    return str(folder / "review.yaml")


@pytest.mark.full
def test_the_page_and_its_file(tmp_path: Path) -> None:
    out = io.StringIO()
    file, plot = tmp_path / "found.json", tmp_path / "plot"
    given = {"json_file": file, "plot": plot, "console": Console(file=out, width=200)}
    done = run_review([written(tmp_path)], **given)
    assert "| devices | 2 | 32 |" in out.getvalue()
    assert "Measured: ring, 2 devices: 83%" in out.getvalue()
    assert "read from compiled programs (program.yaml)" in out.getvalue()
    assert {path.name for path in plot.iterdir()} == {"review.png", "review.svg"}
    data = json.loads(file.read_text())
    # Two devices exchange half of the gradients each way, twice.
    assert done.patterns[0].sent == pytest.approx(1, abs=0.02)
    # Parameters and two moments of Adam, in float32; biases and a counter are more.
    assert 12 <= done.patterns[0].state < 12.2
    assert data["patterns"][0]["calls"] == "1 all-reduce"
    assert data["zero_bytes_per_parameter"]["3"]["32"] == 0.5
    pipeline = [p for p in data["efficiency"] if p["architecture"] == "pipeline"]
    assert [point["devices"] for point in pipeline] == [2]  # 32 stages are more than layers
    rows = {row["name"]: row for row in data["optimizers"]}
    assert rows["sgd"]["largest"] == 64
    assert (rows["adamw"]["largest"], rows["adamw"]["diverged"]) == (32, 1)
    assert [round(rows[name]["state_bytes"]) for name in ("sgd", "adamw")] == [4, 8]


def test_the_busiest_card_decides_a_servers_step() -> None:
    config = read_review([])
    choice = config.choice(8)
    found = server_seconds(choice, 1.0, config.gbits, Speeds("equal"), MODELS["bsp"])
    assert busiest_card_seconds(config, 8) == pytest.approx(found, rel=0.02)
    # Twice the servers, half of the bytes.
    more = config.model_copy(update={"servers": 8})
    work = config.step_seconds
    ratio = (busiest_card_seconds(more, 64) - work) / (busiest_card_seconds(config, 64) - work)
    assert ratio == pytest.approx(0.5, rel=1e-3)


def test_a_pipeline_fills_with_microbatches() -> None:
    """Without messages 1F1B has m of m + stages - 1 slots full."""
    given = {"devices": (4,), "microbatches": 12, "message_bytes": 0.0, "latency_seconds": 0.0}
    points = curves(read_review([]).model_copy(update=given))
    (found,) = [point for point in points if point.architecture == "pipeline"]
    assert found.efficiency == pytest.approx(12 / 15)


def test_zero_saves_up_to_eight_times_without_parameters() -> None:
    assert [16 / zero_bytes(stage, 10**6) for stage in (1, 2)] == pytest.approx([4, 8], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["devices=[2,2]"], "contains a number twice"),
        (["device=[2]"], "did you mean 'devices'"),
        (["scaling.batches=[32]"], "sgd has 6 cells for 1 batch sizes"),
        (["scaling.cells={}"], "scaling.cells"),
        (["patterns={}"], "patterns"),
        (["measured=[{architecture: star, devices: 2, efficiency: 1, source: s}]"], "star"),
    ],
)
def test_settings_that_cannot_be(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_review(settings)


def scaling(**cells: Any) -> ReviewConfig:
    found = read_review([])
    of_names = {"batches": (32,), "cells": cells}
    return found.model_copy(update={"scaling": found.scaling.model_copy(update=of_names)})


def test_optimizers_that_cannot_be_compared() -> None:
    cell = read_review([]).scaling.cells["sgd"][0]
    with pytest.raises(ConfigError, match="optimizer 'lamp': did you mean 'lamb'"):
        list(optimizer_rows(scaling(lamp=(cell,))))
    diverged = cell.model_copy(update={"mean": None})
    with pytest.raises(ConfigError, match="all optimizers diverged at batch 32"):
        list(optimizer_rows(scaling(sgd=(diverged,))))
