"""What a person reads of a comparison: the table, the verdicts, the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxdist.metrics.figure import save_figure
from jaxdist.study.comparison import VariantResult, comparison_table
from jaxdist.study.comparison_plot import comparison_figure
from jaxdist.study.trial import TrialOutcome, VariantTrial
from jaxdist.study.variants import Variant

Outcomes = tuple[TrialOutcome[VariantTrial], ...]


def outcomes(name: str, *losses: float) -> Outcomes:
    """One of each seed; NaN is a run that diverged."""
    return tuple(
        TrialOutcome(VariantTrial(name, seed), 9, {"loss": loss}, math.isnan(loss), 1.0)
        for seed, loss in enumerate(losses)
    )


BASE = outcomes("plain", 2.0, 4.0)


def row(name: str, sent: float, *losses: float, base: Outcomes = BASE) -> VariantResult:
    return VariantResult(Variant(name), sent, 400.0, outcomes(name, *losses), base)


ROWS = [
    VariantResult(Variant("plain"), 400.0, 400.0, BASE, BASE),
    row("near", 100.0, 2.01, 4.02),
    row("near, mostly", 13.0, 1.95, 4.06),
    row("far", 13.0, 2.2, 4.8),
    row("far, mostly", 13.0, 2.2, 4.02),
    row("better", 100.0, 1.95, 3.88),
    row("better, mostly", 100.0, 1.9, 4.0),
    row("broken", 13.0, 2.2, math.nan),
]
TABLE = """\
| variant        | held-out loss | change, %   | bytes | verdict      |
| -------------- | ------------- | ----------- | ----- | ------------ |
| plain          | 3.000 ± 1.414 |             | 1.000 |              |
| near           | 3.015 ± 1.421 | +0.5 ± 0.0  | 0.250 | within 1%    |
| near, mostly   | 3.005 ± 1.492 | -0.5 ± 2.8  | 0.033 | within 1% ?  |
| far            | 3.500 ± 1.838 | +15.0 ± 7.1 | 0.033 | worse        |
| far, mostly    | 3.110 ± 1.287 | +5.2 ± 6.7  | 0.033 | worse ?      |
| better         | 2.915 ± 1.365 | -2.8 ± 0.4  | 0.250 | better       |
| better, mostly | 2.950 ± 1.485 | -2.5 ± 3.5  | 0.250 | better ?     |
| broken         | -             |             | 0.033 | diverged 1/2 |"""


def test_the_table() -> None:
    assert comparison_table(ROWS) == TABLE


def test_the_widest_table_is_80_wide() -> None:
    base = outcomes("plain", 0.012, 0.013, 0.011)
    wide = row("n" * 20, 399.0, 0.12, 0.9, 0.4, base=base)
    assert wide.verdict == "worse"
    assert max(map(len, comparison_table([wide]).splitlines())) <= 80
    assert max(map(len, comparison_table([row("n" * 20, 1.0, 2.2, math.nan)]).splitlines())) <= 80


def test_one_seed_has_no_spread_and_no_bytes_no_ratio() -> None:
    base = outcomes("plain", 0.5)
    alone = VariantResult(Variant("x"), 0.0, 0.0, outcomes("x", 0.6), base)
    assert "| x       | 0.6000        | +20.0     | -     | worse   |" in comparison_table([alone])
    found = alone.as_json()
    assert (found["spread"], found["change_spread"], found["relative_bytes"]) == (None, None, None)
    assert found["change"] == pytest.approx(0.2)


def test_without_a_baseline_there_is_no_verdict() -> None:
    base = outcomes("plain", math.nan, 2.0)
    assert row("near", 1.0, 2.0, 2.0, base=base).verdict == "no baseline"
    assert row("near", 1.0, 2.0, 2.0, base=base).as_json()["change"] is None


def test_the_picture_shows_every_change(tmp_path: Path) -> None:
    figure = comparison_figure(ROWS, title="t")
    (axes,) = figure.axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    for line, compared in zip(dots, ROWS[1:-1], strict=True):
        assert list(line.get_xdata()) == pytest.approx([100 * c for c in compared.changes])
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert list(cross.get_ydata()) == [6], "the row that diverged"
    low, high = axes.get_xlim()
    assert low < -2
    assert high > 20
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels[0] == "near\n25% of the bytes"
    paths = save_figure(figure, tmp_path / "new", "found", what="the study")
    assert [path.name for path in paths] == ["found.png", "found.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_a_baseline_that_fits_its_data_perfectly_has_no_relative_change() -> None:
    perfect = row("x", 1.0, 0.5, base=outcomes("plain", 0.0))
    assert (perfect.verdict, perfect.as_json()["change"]) == ("no baseline", None)
    assert "no baseline" in comparison_table([perfect])
