from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from bench_needs import needs_torch
from rich.console import Console

import benchmarks as benches
from benchmarks.collectives import gloo as collectives_gloo
from benchmarks.collectives import report as bench
from benchmarks.collectives import time as collectives_time
from benchmarks.collectives import traffic as collectives_traffic
from benchmarks.collectives.plot import plot_time_over_size
from benchmarks.collectives.traffic import TrafficRow, busiest_sent_bytes, longest_chain, row
from benchmarks.core import child
from benchmarks.core import report as core_report
from benchmarks.core.report import Listing, Report
from jaxdist.collectives import Halving, Hierarchical, Ring, Tree, Xla
from jaxdist.errors import RunError
from jaxdist.hlo import ledger_of_text
from jaxdist.hlo.parse import parse

ROW = TrafficRow("cpu", "{type: ring}", "all_reduce", (8,), 10.0, 10.0, 14, 14)
SECONDS = {"{type: xla}": {4096: 1e-3, 16384: 2e-3}, "gloo": {4096: 2e-2, 16384: 3e-2}}


@pytest.mark.parametrize(
    ("algorithm", "sizes", "steps"),
    [
        (Ring(), (3,), 4),
        (Ring(directions=2), (8,), 8),
        (Tree(), (5,), 6),
        (Halving(), (8,), 6),
        (Hierarchical(), (2, 4), 8),
    ],
    ids=str,
)
def test_a_program_is_read_beside_its_formula(algorithm, sizes, steps):
    found = row("cpu", jax.devices(), algorithm, "all_reduce", sizes)
    assert found.steps == found.formula_steps == steps
    assert found.sent_bytes == found.formula_bytes > 0


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_xlas_own_has_bytes_and_no_steps(kind):
    found = row("cpu", jax.devices(), Xla(), kind, (4,))
    assert found.steps is None
    assert found.sent_bytes == found.formula_bytes


def compiled(function, count=4):
    mesh = jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros((count, 8))).compile().as_text()


def shift(x, pairs):
    return jax.lax.ppermute(x, "d", pairs)


def test_the_longest_chain_counts_what_waits_and_not_what_flies_beside():
    def function(x):
        a = shift(shift(x, [(0, 1)]) + 1, [(1, 2)])
        return a + shift(x * 2, [(2, 3)])

    assert longest_chain(parse(compiled(function))) == 2


CALLED = """HloModule called, num_partitions=2

%inner (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %one = f32[2]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %call = f32[2]{0} call(%x), to_apply=%inner
  %start = (f32[2]{0}, f32[2]{0}) collective-permute-start(%call), source_target_pairs={{0,1}}
  ROOT %done = f32[2]{0} collective-permute-done(%start)
}
"""


def test_the_longest_chain_goes_through_called_computations_and_counts_a_start_once():
    assert longest_chain(parse(CALLED)) == 2


def test_the_busiest_device_is_found_over_all_permutes():
    def function(x):
        return shift(x, [(0, 1), (2, 3)]) + shift(2 * x, [(0, 2)]) + shift(3 * x, [(0, 0), (3, 1)])

    found = ledger_of_text(compiled(function), {"d": 4})
    assert busiest_sent_bytes(found) == 2 * 8 * 4


def test_figures_show_the_row_that_is_farthest_off_either_way():
    low = dataclasses.replace(ROW, sent_bytes=5.0, algorithm="{type: low}")
    late = dataclasses.replace(ROW, steps=15, sizes=(2, 4))
    own = dataclasses.replace(ROW, algorithm="{type: xla}", steps=None)
    in_bytes, in_steps = collectives_traffic.figures("cpu", [ROW, own, low, late])
    assert (in_bytes.ratio, in_bytes.holds) == (2.0, False)
    assert "all_reduce by {type: low} on 8 devices" in in_bytes.note
    assert in_steps.ratio == pytest.approx(15 / 14)
    assert "3 programs" in in_steps.note
    assert "on 2x4 devices" in in_steps.note
    assert all(f.holds for f in collectives_traffic.figures("cpu", [ROW, own]))
    rows = collectives_traffic.listing([ROW, own, low, late]).rows
    assert rows == [
        ("cpu", "{type: ring}", 2, "1.000", "1.071"),
        ("cpu", "{type: xla}", 1, "1.000", None),
        ("cpu", "{type: low}", 1, "2.000", "1.000"),
    ]
    nothing_sent = dataclasses.replace(ROW, sent_bytes=0.0)
    assert collectives_traffic.figures("cpu", [nothing_sent])[0].ratio == math.inf


def test_rows_come_back_from_a_process_of_their_own(monkeypatch):
    answer = f"import json; print('noise'); print(json.dumps([{dataclasses.asdict(ROW)!r}]))"
    monkeypatch.setattr(child, "command", lambda *_: [sys.executable, "-c", answer])
    assert collectives_traffic.measure("tpu") == [ROW]


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise SystemExit('no room')", "exit code 1: no room"), ("input()", "after 0.5 s: run")],
)
def test_a_process_that_fails_is_said(monkeypatch, program, said):
    monkeypatch.setattr(child, "TIMEOUT_SECONDS", 0.5 if "after" in said else 60)
    program = program.replace("input()", "import time; time.sleep(60)")
    monkeypatch.setattr(child, "command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(RunError, match=rf"the programs for cpu .*{said}"):
        collectives_traffic.measure("cpu")


def test_a_reduction_sums_over_all_devices_in_place():
    run = collectives_time.Reduction(Ring(), 4096, jax.devices())
    given = run._x = run._x + 1
    run()
    assert given.is_deleted()
    assert run._x.shape == (8 * 1024,)
    assert set(run._x.tolist()) == {8.0}


@pytest.mark.slow  # its parts: tests/collectives/test_bucket.py
def test_fusion_is_figured_in_time_and_permutes():
    time, permutes = collectives_time.fusion_figures(jax.devices()[:4], 3, repeats=2)
    assert (permutes.ours, permutes.reference, permutes.holds) == (18, 6, False)
    assert time.goal == ">= 4"
    assert time.ratio > 0


@pytest.mark.slow
def test_large_figures_name_the_ring_and_leave_a_missing_peer_out(monkeypatch):
    monkeypatch.setattr(collectives_time, "SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(collectives_time, "RINGS", (Ring(), Ring(directions=2)))
    figures = collectives_time.large_figures(jax.devices(), None, 1, size_bytes=2**20)
    names = ["1 MiB x 8, ring over psum", "1 MiB x 8, ring over psum, input kept"]
    assert [figure.name for figure in figures] == names
    assert [figure.goal for figure in figures] == ["<= 2", "<= 2"]
    assert all("by {type: ring" in figure.note for figure in figures)
    assert ["(donated)" in figure.note for figure in figures] == [True, False]


def test_a_reduction_that_keeps_its_input_gives_the_same_each_time():
    run = collectives_time.Reduction(Ring(), 4096, jax.devices(), donate=False)
    run._x = run._x + 1
    run()
    run()
    assert set(run._x.tolist()) == {1.0}
    assert set(run._run(run._x).tolist()) == {8.0}


def test_the_table_has_nccl_tests_bandwidths():
    listing = collectives_time.size_listing({"ring": {8 * 10**9: 2.0}}, devices=8)
    assert listing.rows == [(8 * 10**9, "ring", 2.0, 4.0, 7.0)]
    assert list(listing.columns) == ["size", "algorithm", "time", "algbw", "busbw"]


@pytest.mark.full
def test_times_are_taken_in_turn_and_the_first_round_is_left_out():
    calls = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = collectives_time.rotate(runs, least_seconds=0.0)
    assert calls == ["a", "b"] * 4
    assert [len(sample.seconds) for sample in found.values()] == [3, 3]


@pytest.mark.slow
def test_every_size_is_timed_with_every_algorithm(monkeypatch):
    monkeypatch.setattr(collectives_time, "SECONDS_A_SIZE", 0.0)
    found = collectives_time.by_size(
        jax.devices(), None, sizes=(4096, 8192), algorithms=(Xla(), Hierarchical())
    )
    assert {name: list(by_bytes) for name, by_bytes in found.items()} == {
        "{type: xla}": [4096, 8192],
        "{type: hierarchical}": [4096, 8192],
    }


@needs_torch
def test_gloo_answers_each_size_and_ends_with_the_context():
    with collectives_gloo.gloo(2) as peers:
        peers.all_reduce(4096, times=3)
        peers.all_reduce(8192)
        process = peers._process
    assert process.returncode == 0


@needs_torch
def test_gloo_that_has_ended_is_said():
    with collectives_gloo.gloo(2) as peers:
        peers._process.kill()
        with pytest.raises(RunError, match=r"over gloo ended with exit code -9: run `python"):
            peers.all_reduce(4096)


def test_the_peer_imports_nothing_of_ours():
    text = collectives_gloo.PEER.read_text()
    assert not re.search(r"import jaxdist|jaxdist\.\w", text)


def test_the_picture_is_written_twice(tmp_path):
    paths = plot_time_over_size(SECONDS, tmp_path / "new", title="All-reduce")
    assert [path.name for path in paths] == ["collectives.png", "collectives.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    svg = paths[1].read_text()
    assert "<svg" in svg


def test_the_picture_has_logarithmic_scales_and_a_line_each():
    from benchmarks.collectives.plot import time_over_size

    (axes,) = time_over_size(SECONDS, title="All-reduce").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in axes.lines] == ["xla", "gloo"]
    assert axes.lines[1].get_ydata().tolist() == [2e-2, 3e-2]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4 KiB", "16 KiB"]


def test_a_picture_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"plot of bench collectives to .*file.*another directory"):
        plot_time_over_size(SECONDS, tmp_path / "file", title="All-reduce")


@pytest.mark.slow  # its parts: above
def test_the_report_in_one_piece(monkeypatch, tmp_path):
    for name, value in {"SIZES": (4096, 8192), "TENSOR_COUNTS": (3,), "SECONDS_A_SIZE": 0}.items():
        monkeypatch.setattr(collectives_time, name, value)
    monkeypatch.setattr(collectives_time, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(collectives_time, "RINGS", (Ring(),))
    monkeypatch.setattr(collectives_time, "ALGORITHMS", (Xla(), Ring()))
    monkeypatch.setattr(collectives_traffic, "measure", lambda _: [ROW])
    monkeypatch.setattr(core_report, "find_spec", lambda _: None)
    report = bench.bench(repeats=1, plot=tmp_path)
    names = [figure.name for figure in report.figures]
    assert names == [
        "bytes sent, cpu",
        "steps, cpu",
        "bytes sent, tpu",
        "1 MiB x 8, ring over psum",
        "1 MiB x 8, ring over psum, input kept",
        "ring over gloo",
        "3 tensors fused: time",
        "3 tensors fused: permutes",
    ]
    notes = [figure.note for figure in report.figures if figure.note.startswith("skipped: ")]
    assert ["tpu" in notes[0], "torch is not installed" in notes[1]] == [True, True]
    assert (tmp_path / "collectives.svg").exists()
    report.write_json(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert [listing["title"] for listing in found["listings"]] == [
        "all-reduce of float32 on 8 devices",
        "compiled programs over the formula, the worst of each algorithm",
    ]
    assert [row["size"] for row in found["listings"][0]["rows"]] == [4096, 4096, 8192, 8192]


def test_a_bench_that_draws_does_so_beside_its_json(monkeypatch, tmp_path):
    drawn = []

    def mine(plot=None):
        drawn.append(plot)
        return Report("mine", [])

    monkeypatch.setattr(bench, "mine", mine, raising=False)
    monkeypatch.setitem(benches.BENCHES, "mine", f"{bench.__name__}:mine")
    benches.run("mine", tmp_path / "out.json")
    benches.run("mine", tmp_path / "out.json", plot="elsewhere")
    benches.run("mine")
    assert drawn == [tmp_path, "elsewhere", None]


def test_a_listing_is_printed_below_the_figures():
    columns = {"size": "B", "algorithm": "", "time": "s"}
    listing = Listing("sizes", columns, [(4096, "ring", 0.001), (2**20, "xla", None)])
    console = Console(file=io.StringIO(), width=80)
    Report("x", [], [listing]).print(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().replace("│", " ").splitlines()
    assert ["4", "KiB", "ring", "1", "ms"] in [line.split() for line in lines]
    assert ["1", "MiB", "xla"] in [line.split() for line in lines]
    assert "listings" not in Report("x", []).as_json()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.needs_libtpu)])
def test_every_formula_holds(platform):
    found = collectives_traffic.measure(platform)
    sizes = {row.sizes[0] for row in found if len(row.sizes) == 1}
    assert sizes == {2, 3, 4, 5, 6, 7, 8, 16, 64}
    assert all(figure.holds for figure in collectives_traffic.figures(platform, found))
