"""What a person reads: the table, the words below it, the picture, the time left."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from study_runs import cell, outcome

from jaxdist.errors import RunError
from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.study.batch_scaling import _line
from jaxdist.study.plan import StudyCell
from jaxdist.study.plot import batch_scaling_figure
from jaxdist.study.table import study_table, verdict
from jaxdist.study.trial import Trial, TrialOutcome
from jaxdist.study.watch import Watch

CELLS = [
    cell("lamb", 32, 0.98, 0.99),
    cell("lamb", 32, 0.98, 0.99, tuned=True),
    cell("sgd", 32, 0.985, 0.995),
    cell("sgd", 32, 0.985, 0.995, tuned=True),
    cell("lamb", 64, 0.981, 0.981),
    cell("lamb", 64, 0.982, 0.982, tuned=True),
    cell("sgd", 64, 0.9, None),
    cell("sgd", 64, 0.981, 0.981, tuned=True),
    cell("lamb", 128, 0.90, 0.90),
    cell("lamb", 128, 0.983, 0.983, tuned=True),
    cell("sgd", 128, 0.989, 0.989),
    cell("sgd", 128, 0.7, 0.7, tuned=True),
]
TABLE = """\
| optimizer | learning rate    | 32         | 64           | 128        |
| --------- | ---------------- | ---------- | ------------ | ---------- |
| lamb      | by rule from 0.1 | 98.5 ± 0.7 | 98.1 ± 0.0   | 90.0 ± 0.0 |
| sgd       | by rule from 0.1 | 99.0 ± 0.7 | diverged 1/2 | 98.9 ± 0.0 |
| lamb      | tuned            | 98.5 ± 0.7 | 98.2 ± 0.0   | 98.3 ± 0.0 |
| sgd       | tuned            | 99.0 ± 0.7 | 98.1 ± 0.0   | 70.0 ± 0.0 |"""


def test_the_table() -> None:
    assert study_table(CELLS) == TABLE


def test_the_verdict_says_what_the_table_says() -> None:
    assert verdict(CELLS) == [
        "holds up: mean within one point of the best at batch 32 (sgd, 99.0 ± 0.7)",
        # SGD is as good again at 128, but diverged on the way there.
        "learning rate by the rule: lamb to 64, sgd to 32",
        "learning rate tuned: lamb to 128, sgd to 64",
    ]


def test_the_verdict_where_nothing_holds() -> None:
    poor = [cell("lamb", 32, 0.9), cell("sgd", 32, 0.99), cell("lars", 32, None)]
    assert (
        verdict(poor)[1]
        == "learning rate by the rule: lamb at no batch, sgd to 32, lars at no batch"
    )
    assert verdict([cell("lars", 32, None)]) == [
        "every optimizer diverged at the base batch: there is nothing to compare with; begin "
        "--batches with a smaller size"
    ]


def losses(name: str, batch_size: int, loss: float) -> StudyCell:
    trial = Trial(name, batch_size, 0, 0.1, 0)
    return StudyCell(
        name, batch_size, False, (TrialOutcome(trial, 10, {"loss": loss}, False, 1.0),)
    )


def test_of_a_loss_less_is_better() -> None:
    cells = [losses("sgd", 32, 2.0), losses("lamb", 32, 2.015), losses("sgd", 64, 2.1)]
    cells.append(losses("lamb", 64, 2.019))
    assert "| 2.000 | 2.100 |" in study_table(cells)
    assert verdict(cells) == [
        "holds up: mean within 1% of the best at batch 32 (sgd, 2.000)",
        "learning rate by the rule: sgd to 32, lamb to 64",
    ]


def test_the_picture_shows_every_mean_and_marks_what_diverged(tmp_path: Path) -> None:
    figure = batch_scaling_figure(CELLS, title="cnn on digits")
    by_rule, tuned = figure.axes
    for axes, wanted in ((by_rule, False), (tuned, True)):
        drawn = [container[0].get_ydata().tolist() for container in axes.containers]
        for name, heights in zip(("lamb", "sgd"), drawn, strict=True):
            means = [c.mean for c in CELLS if (c.optimizer, c.tuned) == (name, wanted)]
            assert heights == pytest.approx([100 * (1 - mean) for mean in means], nan_ok=True)
    bar = by_rule.containers[0][2][0].get_segments()[0]
    assert sorted(height for _, height in bar) == pytest.approx([1.0, 2.0]), "98 and 99%"
    crosses = [line.get_xdata().size for line in by_rule.lines if line.get_marker() == "x"]
    assert crosses == [0, 1]
    labels = {tick.get_text(): tick.get_position()[1] for tick in by_rule.get_yticklabels()}
    assert labels["98"] == 2.0
    low, high = by_rule.get_ylim()
    assert low > high, "less error lies higher"
    paths = save_figure(figure, tmp_path / "new", "batch_scaling", what="the study")
    assert [path.name for path in paths] == ["batch_scaling.png", "batch_scaling.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"plot of the study to .*file: File exists"):
        save_figure(new_figure((1, 1)), tmp_path / "file", "batch_scaling", what="the study")


def test_the_time_left_is_that_of_the_nearest_size_so_far() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Watch([32, 32, 64, 1024], console) as watch:
        watch.begin(str(Trial("lamb", 32, 0, 0.1, 0)))
        watch.took(20.0)
        watch.done("lamb, batch 32: 98.5 ± 0.7 by rule")
        assert watch.seconds_left() == 60.0
        watch.took(10.0)
        watch.took(20.0)
        watch.done("sgd")
        assert watch.seconds_left() == 50.0
        watch.took(5.0)
        watch.done("lamb")
        assert watch.seconds_left() == 5.0
        watch.took(1.0)
        watch.done("sgd")
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]  (a StringIO)
    assert lines[0] == "lamb, batch 32: 98.5 ± 0.7 by rule; 1:00 left"
    assert lines[3] == "sgd; done"


def test_what_is_said_of_an_optimizer_at_a_batch() -> None:
    assert _line(CELLS[:2]) == "lamb, batch 32: 98.5 ± 0.7 by rule, 98.5 ± 0.7 tuned"
    assert _line([CELLS[6]]) == "sgd, batch 64: diverged 1/2 by rule"


def test_outcomes_of_one_seed_have_no_spread() -> None:
    assert "| 90.0 |" in study_table(
        [StudyCell("sgd", 32, False, (outcome(Trial("sgd", 32, 0, 0.1, 0), 0.9),))]
    )
