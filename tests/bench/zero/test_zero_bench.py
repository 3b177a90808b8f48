"""The bench of ZeRO: formulas are the paper's, figures name the worst, programs are compiled."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from typing import Any

import jax
import numpy as np
import pytest

import benchmarks as benches
from benchmarks.core import child
from benchmarks.core import report as report_module
from benchmarks.core.report import Figure, Report
from benchmarks.zero import paper as zero_paper
from benchmarks.zero import plot as zero_plot
from benchmarks.zero import program as zero_program
from benchmarks.zero import race as zero_race
from benchmarks.zero import report as zero
from benchmarks.zero.paper import PaperRow
from benchmarks.zero.program import (
    FLOAT32,
    MIXED,
    STAGES,
    CompiledStep,
    ZeroRow,
    added_bytes_per_param,
    bound_bytes,
    formula_bytes,
)
from jaxdist.errors import RunError
from jaxdist.hlo import Ledger, Memory

SMALL = {"type": "gpt", "embed": 64, "heads": 2}
ROW = ZeroRow("cpu", 8, 1, "explicit", "full", 1000, 9500.0, 9.0, 7000.0, 130.0, 100.0)
PAPER = [
    PaperRow(0, "explicit", 10**9, 16e9, 18e9, 8e9),
    PaperRow(1, "explicit", 10**9, 4e9, 4.2e9, None),
    PaperRow(0, "auto", 10**9, 16e9, 17e9, 8e9),
    PaperRow(1, "auto", 10**9, 4e9, 5e9, None),
]


@pytest.mark.parametrize(
    ("kinds", "devices", "expected"),
    [
        (FLOAT32, 8, [16, 9, 5.5, 2]),
        (FLOAT32, 64, [16, 8.125, 4.1875, 0.25]),
        (MIXED, 64, [16, 4.1875, 2.21875, 0.25]),
    ],
)
def test_the_formula_is_the_papers(kinds, devices, expected):
    assert [formula_bytes(kinds, stage, devices) for stage in STAGES] == expected


def test_the_paper_has_31_17_and_2_gigabytes():
    found = [7.5 * formula_bytes(MIXED, stage, 64) for stage in STAGES]
    np.testing.assert_allclose(found, [120, 31.4, 16.6, 1.9], atol=0.05)


def test_stage_3_sends_half_as_much_again():
    assert [bound_bytes(80.0, stage, 8) for stage in STAGES] == [140, 140, 140, 210]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(zero_program, "MODEL", SMALL)
    monkeypatch.setattr(zero_program, "DEEP", 3)
    monkeypatch.setattr(zero_program, "SHALLOW", 2)
    zero_program.ideal_flops.cache_clear()
    yield
    zero_program.ideal_flops.cache_clear()


@pytest.mark.full
def test_a_step_is_read_beside_its_formula(small):
    found = zero_program.row("cpu", jax.devices()[:4], 3, "explicit", memory=True)
    assert (found.devices, found.stage, found.form, found.remat) == (4, 3, "explicit", "full")
    assert 0.9 < found.sent_bytes / bound_bytes(4 * found.params, 3, 4) <= 1.02
    assert 1.2 < found.flops / found.ideal_flops < 1.4
    assert found.bytes_per_param is not None
    assert 0.9 < found.bytes_per_param / formula_bytes(FLOAT32, 3, 4) < 1.3


def test_what_further_layers_add_is_their_state_and_not_their_inputs():
    def step(layers, params, peak_bytes):
        memory = Memory(0, 0, 0, 0, 0, peak_bytes)
        return CompiledStep(layers, params, Ledger((), 0.0, 0.0, memory, 1, {"data": 1}))

    kept_bytes = zero_program.WINDOW * int(zero_program.MODEL["embed"]) * 4
    shallow, deep = step(2, 700, 5000), step(4, 900, 5000 + 200 * 16 + 2 * kept_bytes)
    assert added_bytes_per_param(deep, shallow) == 16


def test_state_figures_are_of_the_explicit_form_with_a_goal_a_stage():
    rows = [dataclasses.replace(ROW, stage=stage, bytes_per_param=9.0) for stage in STAGES]
    rows += [dataclasses.replace(ROW, form="auto"), dataclasses.replace(ROW, bytes_per_param=None)]
    found = zero.state_figures(rows)
    assert [(f.ours, f.reference, f.goal) for f in found] == [
        (9.0, 16, "<= 1.10"),
        (9.0, 9.0, "<= 1.10"),
        (9.0, 5.5, "<= 1.10"),
        (9.0, 2.0, "<= 1.20"),
    ]
    assert found[0].name == "held a parameter, stage 0, 8 devices"
    assert found[0].note == zero.BYTES_NOTE


def test_the_worst_stage_stands_for_all():
    rows = [
        ROW,
        dataclasses.replace(ROW, form="auto", peak_bytes=9000.0, sent_bytes=1e9, flops=1e9),
        dataclasses.replace(ROW, stage=2, peak_bytes=6000.0, sent_bytes=14000.0, flops=150.0),
        dataclasses.replace(ROW, stage=2, form="auto", peak_bytes=6000.0),
        dataclasses.replace(ROW, remat="none", bytes_per_param=None, peak_bytes=1e9, flops=102.0),
    ]
    (auto,) = zero.auto_figures(rows)
    assert (auto.ours, auto.reference, auto.holds) == (9500.0, 9000.0, False)
    assert auto.note.endswith("is 1")
    (sent,) = zero.sent_figures(rows)
    assert (sent.ours, sent.reference, sent.holds) == (14000.0, 7000.0, False)
    assert sent.note == "the worst of 3 programs is stage 2"
    assert sent.name == "bytes sent, cpu, 8 devices"
    none, full = zero.flops_figures(rows)
    assert (none.ratio, none.goal, none.holds) == (1.02, "<= 1.03", True)
    assert (full.ratio, full.goal, full.holds) == (1.5, "<= 1.36", False)


def test_the_listing_has_every_program():
    found = zero.listing([ROW, dataclasses.replace(ROW, bytes_per_param=None)])
    assert list(found.rows) == [
        ("cpu 8", 1, "explicit", "full", "9.00", "9.00", "9.50", "1.000", "1.300"),
        ("cpu 8", 1, "explicit", "full", None, "9.00", "9.50", "1.000", "1.300"),
    ]


def test_stage_0_must_be_refused_and_the_others_must_not():
    rows = [PAPER[0], PAPER[1], dataclasses.replace(PAPER[1], stage=2, memory_bytes=4e9)]
    refused, held, too_large = zero.paper_figures([*rows, *PAPER[2:]])
    assert (refused.ratio, refused.goal, refused.holds) == (18 / 8, ">= 1", True)
    assert "refused by the compiler" in refused.note
    assert (held.ratio, held.goal, held.holds) == (pytest.approx(1.05), "<= 1.08", True)
    assert too_large.holds is False
    (fits,) = zero.paper_figures([dataclasses.replace(PAPER[0], memory_bytes=None)])
    assert fits.holds is False


@pytest.mark.slow  # a compiled step: test_a_step_is_read_beside_its_formula
def test_a_step_of_the_paper_is_compiled(monkeypatch):
    monkeypatch.setattr(zero_paper, "WINDOW", 2)
    found = zero_paper.row(1, "explicit", jax.devices(), {**SMALL, "layers": 2})
    assert found.formula_bytes == found.params * formula_bytes(MIXED, 1, 8)
    assert 1 < found.peak_bytes / found.formula_bytes < 3
    assert not found.refused


class Failing:
    def __init__(self, message: str):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def test_what_the_compiler_refuses_is_measured_and_what_it_fails_at_an_error():
    refused: Any = Failing("CompileTimeHbmOom: needed (3.00G) exceeds available HBM (2.00G)")
    assert zero_paper.compiled_bytes(refused) == (3 * 2**30, 2 * 2**30)
    failed: Any = Failing("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        zero_paper.compiled_bytes(failed)


def test_the_model_of_the_paper_has_7_and_a_half_billion_parameters():
    layer = 4 * 3072**2 + 3 * 3072 * 8192 + 2 * 3072
    assert zero_paper.MODEL["layers"] * layer / 1e9 == pytest.approx(7.5, rel=0.005)


def test_records_come_from_a_process_with_its_own_devices(monkeypatch):
    seen = {}

    def run(command, env, timeout, **_):
        seen.update(command=command, flags=env["XLA_FLAGS"], timeout=timeout)
        return subprocess.CompletedProcess(command, 0, json.dumps([dataclasses.asdict(ROW)]), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert zero_program.measure("cpu") == [ROW]
    assert "device_count=64" in seen["flags"]
    assert child.QUICK_FLAG in seen["flags"]
    assert seen["command"][-2:] == ["benchmarks.zero.program:platform_rows", '"cpu"']


def test_the_picture_has_a_bar_each_and_hatches_what_is_refused():
    (axes,) = zero_plot.memory(PAPER).axes
    formula, explicit, auto = axes.containers
    assert [bar.get_height() for bar in formula] == [16.0, 4.0]
    assert [bar.get_height() for bar in explicit] == [18.0, 4.2]
    assert [bool(bar.get_hatch()) for bar in auto] == [True, False]
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [[8.0, 8.0]]
    assert "18.0\nrefused" in [text.get_text() for text in axes.texts]


def test_the_picture_is_written_or_that_is_said(tmp_path):
    path = zero_plot.plot_memory(PAPER, tmp_path / "new")
    assert path == tmp_path / "new" / "zero_memory.svg"
    assert "<svg" in path.read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"plot of bench zero to .*file.*another directory"):
        zero_plot.plot_memory(PAPER, tmp_path / "file")


@pytest.mark.parametrize("here", [True, False])
def test_the_report_in_one_piece(monkeypatch, tmp_path, here):
    rows = [dataclasses.replace(ROW, form=form) for form in ("explicit", "auto")]
    rows.append(dataclasses.replace(ROW, remat="none", bytes_per_param=None))
    monkeypatch.setattr(
        zero_program,
        "measure",
        lambda platform: [dataclasses.replace(row, platform=platform) for row in rows],
    )
    monkeypatch.setattr(zero_paper, "measure", lambda: PAPER)
    monkeypatch.setattr(report_module, "find_spec", lambda _: here or None)
    race = Figure("torch", 1.0, 1.0, unit="")
    monkeypatch.setattr(zero_race, "bench", lambda: Report("zero_race", [race]))
    report = benches.run("zero", tmp_path / "zero.json")
    names = [figure.name for figure in report.figures]
    common = [
        "held a parameter, stage 1, 8 devices",
        "peak over plain sharding constraints, 8 devices",
        "bytes sent, cpu, 8 devices",
        "FLOPs, remat none",
        "FLOPs, remat full",
    ]
    assert names[:5] == common
    if here:
        assert names[5:] == [
            "bytes sent, tpu, 8 devices",
            "1.00B on 64 v5p, stage 0",
            "1.00B on 64 v5p, stage 1",
            "torch",
        ]
    else:
        assert names[5:] == ["tpu programs", "torch"]
    assert (tmp_path / "zero_memory.svg").exists() is here
    found = json.loads((tmp_path / "zero.json").read_text(), parse_constant=pytest.fail)
    assert len(found["listings"]) == 1 + here


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_the_tpu_program_sends_the_bound():
    assert all(figure.holds for figure in zero.sent_figures(zero_program.measure("tpu")))
