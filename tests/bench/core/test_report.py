from __future__ import annotations

import io
import json
import math
import re

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks
from benchmarks.core.harness import Sample
from benchmarks.core.report import Figure, Report
from jaxdist.cli import app, shared
from jaxdist.errors import ConfigError, JaxdistError, RunError


@pytest.mark.parametrize(
    ("goal", "ours", "holds"),
    [
        ("<= 1.03", 1.03, True),
        ("<= 1.03", 1.04, False),
        (">= 2", 2.0, True),
        (">=2", 1.99, False),
        ("", 5.0, None),
        ("<= 0", 0.0, True),
        ("<= 0", 1.0, False),
    ],
)
def test_a_goal_is_held_against_the_ratio(goal, ours, holds):
    assert Figure("x", ours, 1.0, goal).holds is holds


@pytest.mark.parametrize("goal", ["< 1", "<= fast", "1.03", "<= 1.5 s", "<= -1"])
def test_a_goal_that_cannot_be_read_is_refused(goal):
    with pytest.raises(JaxdistError, match=rf"figure 'step': goal '{goal}' cannot be read"):
        Figure("step", 1, 1, goal)


def test_a_reference_of_nothing_gives_no_ratio_and_meets_no_goal():
    figure = Figure("x", 1.0, 0.0, "<= 2")
    assert math.isnan(figure.ratio)
    assert figure.holds is False
    assert figure.as_json()["ratio"] is None


def test_samples_give_medians_spreads_and_the_paired_ratio():
    ours, reference = Sample((2.0, 4.0, 30.0)), Sample((1.0, 4.0, 10.0))
    figure = Figure.compare("step", ours, reference, "<= 1.5", "on a note")
    assert (figure.ours, figure.reference, figure.ratio) == (4.0, 4.0, 2.0)
    assert (figure.ours_iqr, figure.reference_iqr) == (ours.iqr, reference.iqr)
    assert figure.holds is False


FIGURES = (
    Figure("step time", 0.0103, 0.01, "<= 1.03", ours_iqr=0.001, reference_iqr=0.002),
    Figure("a figure with a name that goes on for longer than a line", 3, 1, "<= 1.2", "bytes"),
    Figure("only shown", 2.0, math.nan, note="why [it] is shown"),
)


def test_the_json_of_a_report(tmp_path):
    Report("overhead", FIGURES).write_json(tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert list(report) == ["schema", "bench", "versions", "figures"]
    assert report["bench"] == "overhead"
    assert list(report["versions"]) == [
        *("python", "jax", "jaxlib", "flax", "optax", "numpy", "jaxdist"),
        *("platform", "devices", "cpus"),
    ]
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["devices"] == "8 x cpu"
    assert report["figures"][0] == {
        "name": "step time",
        "ours": 0.0103,
        "reference": 0.01,
        "ratio": pytest.approx(1.03),
        "ours_iqr": 0.001,
        "reference_iqr": 0.002,
        "goal": "<= 1.03",
        "unit": "s",
        "note": "",
        "holds": True,
    }
    assert [figure["holds"] for figure in report["figures"]] == [True, False, None]
    assert report["figures"][2]["reference"] is None
    assert report["figures"][2]["goal"] is None


def test_a_report_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(RunError, match=r"bench 'overhead' to .*absent/out.json: No such file"):
        Report("overhead", FIGURES).write_json(tmp_path / "absent" / "out.json")


def test_the_table_fits_80_columns():
    console = Console(file=io.StringIO(), width=80)
    Report("overhead", FIGURES).print(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    (row,) = [line for line in text.splitlines() if line.startswith(" step time")]
    assert row.replace("│", " ").split() == [
        *("step", "time", "10.3", "ms", "10", "ms", "1.030", "<=", "1.03", "yes")
    ]
    assert "only shown: why [it] is shown" in text
    assert "no" in text.split()


def test_run_finds_the_bench_passes_its_options_and_writes(monkeypatch, tmp_path):
    monkeypatch.setitem(benchmarks.BENCHES, "mine", f"{__name__}:mine")
    report = benchmarks.run("mine", tmp_path / "out.json", repeats=3)
    assert report.figures[0].ours == 3
    assert json.loads((tmp_path / "out.json").read_text())["bench"] == "mine"


def mine(repeats: int = 9) -> Report:
    return Report("mine", [Figure("repeats", repeats, 1, "<= 1")])


def test_an_unknown_bench_is_named_with_the_closest():
    with pytest.raises(JaxdistError, match="no bench is named 'startp': did you mean 'startup'"):
        benchmarks.run("startp")


@pytest.mark.parametrize(
    ("command", "extra"), [("bench startup", "bench"), ("parity --draw 1", "test")]
)
def test_an_installed_package_says_where_benchmarks_are(command, extra, monkeypatch, tmp_path):
    monkeypatch.setattr(shared, "__file__", str(tmp_path / "jaxdist" / "cli" / "shared.py"))
    refused = CliRunner().invoke(app, command.split()).exception
    assert isinstance(refused, ConfigError)
    called = " ".join(command.split()[:-1])
    assert re.search(
        rf"run `jaxdist {called}` from a checkout .*pip install -e '\.\[{extra}\]'", str(refused)
    )


def test_an_option_that_a_bench_does_not_take_is_named():
    with pytest.raises(JaxdistError, match=r"'startup' takes no option repeat=3: .*'repeats'"):
        benchmarks.run("startup", repeat=3)


@pytest.mark.parametrize("name", benchmarks.BENCHES)
def test_every_registered_bench_can_be_found_and_says_what_it_measures(name):
    import importlib

    module, _, function = benchmarks.BENCHES[name].partition(":")
    assert getattr(importlib.import_module(module), function).__doc__
