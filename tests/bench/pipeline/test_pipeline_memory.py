"""Temporary memory: read from small programs, and figures of the worst."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest
from rich.console import Console

from benchmarks.core import child
from benchmarks.pipeline import memory as pipeline_memory
from benchmarks.pipeline.memory import BUILDS, MemoryCell, growths
from benchmarks.pipeline.program import ModelSize
from jaxdist.errors import RunError

MIB = 2.0**20
CELLS = [
    MemoryCell(name, activations, 4, m, sizes[m] * MIB)
    for (name, activations), sizes in {
        ("1f1b", "recompute"): {4: 3.0, 8: 4.0, 32: 4.1},
        ("1f1b, ahead", "stash"): {4: 3.0, 8: 5.0, 32: 5.0},
        ("gpipe", "recompute"): {4: 4.0, 8: 8.0, 32: 24.0},
        ("gpipe", "stash"): {4: 4.0, 8: 8.0, 32: 32.0},
    }.items()
    for m in sizes
]


@pytest.mark.parametrize(
    ("name", "activations"), [("1f1b", "recompute"), ("1f1b, ahead", "stash"), ("gpipe", "stash")]
)
@pytest.mark.every(3)
def test_a_schedule_holds_what_it_promises(monkeypatch, name, activations):
    """The tables of ticks lie in this memory, too, so that activations must not be tiny."""
    monkeypatch.setattr(pipeline_memory, "SIZE", ModelSize(rows=64, features=64, layers=1))
    cells = (pipeline_memory.cell(name, activations, 2, m) for m in (4, 16))
    (growth,) = growths(cells)
    if name == "gpipe":
        assert growth.ratio > 2
    else:
        assert 1 <= growth.ratio < 1.05


def test_a_pipeline_is_full_at_twice_as_many_microbatches_as_stages():
    assert [(g.full.microbatches, g.last.microbatches) for g in growths(CELLS)] == [(8, 32)] * 4


def test_figures_show_the_worst():
    flat, grows = pipeline_memory.figures(CELLS)
    assert flat.ratio == pytest.approx(1.025)
    assert flat.holds
    assert "32 over 8 microbatches" in flat.note
    assert flat.note.endswith("the worst is 1f1b, recompute")
    assert (grows.ratio, grows.holds) == (3, True)
    assert grows.note.endswith("the worst is gpipe, recompute")
    wrong = [dataclasses.replace(one, temp_bytes=one.microbatches * MIB) for one in CELLS[:3]]
    level = [dataclasses.replace(one, temp_bytes=MIB) for one in CELLS[6:9]]
    assert [f.holds for f in pipeline_memory.figures([*wrong, *level])] == [False, False]


def test_the_listing_fits_80_columns():
    cells = [
        MemoryCell(name, activations, 4, m, 1234.5 * MIB)
        for name in BUILDS
        for activations in ("recompute", "stash")
        for m in (4, 8, 16, 32)
    ]
    listing = pipeline_memory.listing(cells)
    assert listing.rows[0] == ("1f1b", "recompute", *["1234.50"] * 4, "1.000")
    assert [*listing.columns][2:] == ["m=4", "m=8", "m=16", "m=32", "32 over 8"]
    assert Console(width=80).measure(listing.table()).maximum <= 80


def test_cells_come_from_a_process_with_a_device_for_each_stage(monkeypatch):
    seen = {}

    def run(command, env, timeout, **_):
        seen.update(command=command, flags=env["XLA_FLAGS"], timeout=timeout)
        text = json.dumps([dataclasses.asdict(one) for one in CELLS])
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert pipeline_memory.measure() == CELLS
    assert "device_count=4" in seen["flags"]
    assert child.QUICK_FLAG in seen["flags"]
    assert seen["command"][2:] == [
        "-m",
        "benchmarks.core.child",
        "benchmarks.pipeline.memory:cells",
    ]


def test_it_always_ends(monkeypatch):
    monkeypatch.setattr(child, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"compiling pipelines for their memory is not done after"):
        pipeline_memory.measure()


def test_the_cells(monkeypatch):
    monkeypatch.setattr(pipeline_memory, "cell", lambda *args: MemoryCell(*args, temp_bytes=1.0))
    found = [*pipeline_memory.cells()]
    assert len(found) == 3 * 2 * 4
    assert {one.microbatches for one in found} == {4, 8, 16, 32}
