"""`jaxdist pipeline`: what it says of schedules, what it refuses, and that it needs no jax."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.commands import compare_schedules, pipelines
from jaxdist.errors import ConfigError, RunError
from jaxdist.pipeline_schedules.csv_form import read_csv, write_csv
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1

SIZES = ["--stages", "4", "--microbatches", "8"]
VIOLATION = "0F0,0B0\n1B0,1F0\n"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80, highlight=False)


def text(console):
    return console.file.getvalue()


def run(*words):
    """What a command printed; a command that raises, raises here."""
    done = CliRunner().invoke(app, ["pipeline", *words], env={"COLUMNS": "80"})
    if isinstance(done.exception, ValueError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_show():
    shown = run("show", "1f1b", *SIZES)
    lines = shown.splitlines()
    assert [line[:8] for line in lines[:4]] == [f"stage {stage} " for stage in range(4)]
    assert lines[0] == "stage 0 |FFFF......BBFBBFBBFBBFBB.BB.BB.BB|"
    assert "bubble 9 of 33 (27.3%); at most 4 activations; 48 messages" in " ".join(shown.split())
    assert "makespan 33 if all stages end together (bubble 27.3%)" in shown
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert rows == [
        ["0", "0", "24", "9", "4", "8", "8"],
        ["1", "1", "24", "9", "3", "16", "16"],
        ["2", "2", "24", "9", "2", "16", "16"],
        ["3", "3", "24", "9", "1", "8", "8"],
    ]
    assert max(map(len, lines)) <= 80


def test_show_says_what_a_flush_costs():
    shown = run("show", "zb_h2", *SIZES)
    assert "bubble 0 of 24 (0.0%); at most 7 activations" in shown
    assert "makespan 27 if all stages end together (bubble 11.1%)" in shown


def test_settings_and_costs(console):
    def look(*settings):
        return pipelines.show_schedule(
            "interleaved", ["chunks=3", *settings], stages=2, microbatches=4, console=console
        )

    found, plain = look("costs.forward=2", "costs.transfer=1"), look()
    assert found.schedule.chunks == 6
    assert {span.end - span.start for row in found.spans for span in row} == {2}
    assert found.busy == (4 * 3 * 4, 4 * 3 * 4)
    assert plain.makespan < found.makespan


def test_costs_are_those_that_an_automatic_schedule_is_made_for():
    request = pipelines.read_request("zb_auto", ["memory_limit=1.5", "costs.forward=[1, 2, 1, 3]"])
    assert request.config.memory_limit == 1.5
    assert request.config.costs == request.costs
    assert request.costs.forward == (1, 2, 1, 3)


def test_files(tmp_path):
    svg, trace, csv = (tmp_path / name for name in ("a.svg", "a.json", "a.csv"))
    shown = run(
        "show", "zb_h1", *SIZES, "--svg", str(svg), "--trace", str(trace), "--csv", str(csv)
    )
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert len(json.loads(trace.read_text())["traceEvents"]) == 5 + 4 * 8 * 3
    assert read_csv(csv).rows == zb_h1(4, 8).rows
    for line in (f"picture: {svg}", f"trace: {trace}", f"schedule: {csv}"):
        assert line in shown
    again = run("show", str(csv))
    assert again.splitlines()[:4] == shown.splitlines()[:4]


def test_a_file_that_cannot_be_written(console, tmp_path):
    nowhere = tmp_path / "no" / "a.svg"
    with pytest.raises(RunError, match=r"cannot write the picture to .*no/a.svg: No such file"):
        pipelines.show_schedule("1f1b", stages=2, microbatches=2, svg=nowhere, console=console)


@pytest.mark.parametrize(
    ("schedule", "settings", "message"),
    [
        (
            "interleavd",
            [],
            r"type = 'interleavd' .*did you mean 'interleaved'\? \(allowed: gpipe, ",
        ),
        ("interleaved", [], r"chunks \(not set in the command line\): required"),
        ("interleaved", ["chunk=2"], r"chunk = 2 \(override 'chunk=2'\): .*did you mean 'chunks'"),
        ("interleaved", ["chunks=1"], r"chunks = 1 \(override 'chunks=1'\): .*at least 2"),
        ("1f1b", ["costs.forward=-1"], r"costs\.forward = -1 \(override .*at least 0"),
        ("1f1b", ["costs.forwards=1"], r"costs\.forwards = 1 .*did you mean 'forward'"),
        ("1f1b", ["costs=5"], r"costs = 5 \(override 'costs=5'\): expected a mapping"),
        ("1f1b", ["chunks"], r"override 'chunks': the setting has no '='"),
        ("1f1b", ["costs.forward=[1, 2]"], r"forward has 2 times for 4 chunks"),
        ("zb_v", [], r"zb_v: 4 stages need at least 7 microbatches, got 6"),
        ("nowhere.csv", [], r"nowhere\.csv: the file cannot be read"),
        ("no/such", [], r"no/such: the file cannot be read"),
    ],
)
def test_what_show_refuses(console, schedule, settings, message):
    with pytest.raises(ConfigError, match=message):
        pipelines.show_schedule(schedule, settings, stages=4, microbatches=6, console=console)


def test_all_problems_at_once(console):
    with pytest.raises(ConfigError, match="3 problems in the command line") as error:
        pipelines.show_schedule("interleaved", ["chunk=2", "costs.kept=2"], console=console)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == [
        "chunks",
        "chunk",
        "costs.kept",
    ]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, r"--stages is not given and --microbatches is not given"),
        ({"stages": 4}, r"--stages is 4 and --microbatches is not given"),
        ({"microbatches": 8}, r"--stages is not given and --microbatches is 8"),
    ],
)
def test_sizes_that_are_not_given(console, sizes, said):
    with pytest.raises(
        ConfigError, match=rf"schedule 1f1b: {said}: give both options; only the CSV"
    ):
        pipelines.show_schedule("1f1b", **sizes, console=console)


def test_a_csv_file_says_its_sizes_itself(console, tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(one_f_one_b(4, 8), path)
    assert pipelines.show_schedule(str(path), console=console).makespan == 33
    assert (
        pipelines.show_schedule("csv", [f"path={path}"], stages=4, console=console).makespan == 33
    )
    with pytest.raises(
        ConfigError, match=r"mine.csv: the file has 8 microbatches, but the run has 16"
    ):
        pipelines.show_schedule(str(path), microbatches=16, console=console)


def test_a_type_is_no_file(console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpipe", "mine"):
        Path(name).write_text("0F0\n")
    named = pipelines.show_schedule("gpipe", stages=2, microbatches=2, console=console)
    assert named.schedule.name == "gpipe"
    assert pipelines.show_schedule("./gpipe", console=console).schedule.stages == 1
    assert pipelines.show_schedule("mine", console=console).schedule.name == "mine"


def test_compare_shows_every_schedule():
    shown = run("compare", "--stages", "4", "--microbatches", "7")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 7:
            rows[cells[0]] = cells[1:]
    assert list(rows) == [
        "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_auto 1x",
        "zb_auto 2x", "zb_v", "v_half", "v_min", "dual_pipe_v",
    ]  # fmt: skip
    assert {row.split()[0] for row in rows} == set(pipelines.ALTERNATIVES) - {"csv"}
    assert rows["1f1b"] == ["30.0%", "30.0%", "30", "4", "42", "1"]
    assert rows["zb_h2"] == ["0.0%", "12.5%", "24", "7", "42", "7"]
    assert rows["interleaved"] == ["refused", "", "", "", "", "4, 8 .."]
    assert rows["dual_pipe_v"] == ["refused", "", "", "", "", "8"]
    flat = " ".join(shown.split())
    assert "refused: schedule interleaved: 7 microbatches are not a multiple of 4 stages" in flat
    assert "refused: schedule dual_pipe_v: 4 stages need at least 8 microbatches, got 7" in flat


def test_costs_of_a_comparison_are_those_of_a_stage(console):
    """Work is the same whatever the number of chunks: a stage's 8 microbatches of 4 + 1 + 1."""
    entries = compare_schedules.compare_schedules(
        ["costs.forward=4", "chunks=4"], stages=4, microbatches=8, console=console
    )
    assert "interleaved, breadth_first: 4 chunks on each stage" in " ".join(text(console).split())
    for entry in entries:
        assert entry.timeline is not None, entry
        assert entry.timeline.busy == pytest.approx((48,) * 4)
    found = {entry.label: entry.timeline for entry in entries if entry.timeline}
    assert found["interleaved"].bubble == pytest.approx(found["1f1b"].bubble / 4)
    assert found["zb_auto 1x"].peak <= 4 < found["zb_auto 2x"].peak <= 8
    slower = compare_schedules.compare_schedules(
        ["costs.transfer=1"], stages=4, microbatches=8, console=console
    )
    plain = compare_schedules.compare_schedules([], stages=4, microbatches=8, console=console)
    for slow, fast in zip(slower, plain, strict=True):
        assert slow.timeline
        assert fast.timeline
        assert slow.timeline.makespan > fast.timeline.makespan


def test_automatic_schedules_are_compared_under_the_given_costs(console):
    costs = ["costs.forward=3", "costs.backward_input=4", "costs.backward_weight=2"]
    entries = compare_schedules.compare_schedules(costs, stages=4, microbatches=16, console=console)
    found = {entry.label: entry.timeline.period for entry in entries if entry.timeline}
    assert found["zb_auto 1x"] <= found["zb_h1"]
    assert found["zb_auto 2x"] <= found["zb_h2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["chunks=1"], r"chunks = 1 .*at least 2"),
        (["memory_limit=1"], r"memory_limit = 1 .*unknown key"),
        (["costs.forward=[1, 2]"], r"costs\.forward = \[1, 2\] .*expected a number"),
    ],
)
def test_what_compare_refuses(console, settings, message):
    with pytest.raises(ConfigError, match=message):
        compare_schedules.compare_schedules(settings, stages=2, microbatches=4, console=console)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (one_f_one_b(4, 8), "4 stages, 4 chunks, 8 microbatches, backward whole"),
        (zb_h1(4, 8), "4 stages, 4 chunks, 8 microbatches, backward in halves"),
        (forward_only((0, 1, 0, 1), 4), "2 stages, 4 chunks, 4 microbatches, forward only"),
    ],
)
def test_check(tmp_path, made, said):
    path = tmp_path / "mine.csv"
    write_csv(made, path)
    assert f"{path} is valid: {said}" in run("check", str(path))


def test_check_says_the_slots(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(one_f_one_b(4, 8), path)
    assert "slots of the ring buffer of each chunk: 4 3 2 1" in run("check", str(path))


def test_the_first_violation(console, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(VIOLATION)
    with pytest.raises(ConfigError, match=r"mine.csv: stage 1, position 0: 1B0 needs 1F0, which"):
        pipelines.check_csv(path, console=console)
    with pytest.raises(ConfigError, match=r"mine.csv: stage 1, position 0: 1B0 needs 1F0, which"):
        pipelines.show_schedule(str(path), console=console)


WITHOUT_JAX = """
import sys
from jaxdist.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
assert not {"jax", "numpy"} & set(sys.modules), "jax was imported"
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "zb_v", *SIZES, "--svg", "a.svg", "--trace", "a.json"], 0, "zb_v: 4 stages"),
        (["compare", *SIZES], 0, "4 stages, 8 microbatches"),
        (["check", "mine.csv"], 2, "error: schedule mine.csv: stage 1, position 0: 1B0 needs 1F0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
@pytest.mark.every(3)
def test_no_command_imports_jax(tmp_path, words, code, said):
    (tmp_path / "mine.csv").write_text(VIOLATION)
    command = [sys.executable, "-c", WITHOUT_JAX, "pipeline", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
