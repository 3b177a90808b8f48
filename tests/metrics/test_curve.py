from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxdist.errors import RunError
from jaxdist.metrics.curve import MAX_POINTS, loss_figure, plot_loss, smooth


def train(values) -> list[dict]:
    return [{"step": i, "split": "train", "loss": v} for i, v in enumerate(values, start=1)]


def heldout(values) -> list[dict]:
    return [{"step": 10 * i, "split": "heldout", "loss": v} for i, v in enumerate(values, start=1)]


def figure_of(records, baselines=None) -> Figure:
    return loss_figure(records, baselines or {}, title="gpt", loss_unit="nats per byte")


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


CASES = {
    "nothing": [],
    "no loss": [{"step": 1, "split": "train", "accuracy": 0.5}],
    "one point": train([3.0]),
    "two equal points": train([0.0, 0.0]),
    "only nan": train([math.nan, math.inf]),
    "nan inside": train([3.0, math.nan, 2.0]),
    "only held out": heldout([2.0, 1.5]),
    "nan held out": heldout([math.nan]),
    "four splits": [dict(r, split=s) for s in "abcd" for r in heldout([2.0, 1.5])],
}


@pytest.mark.parametrize("baselines", [{}, {"trigram model": 2.0, "uniform": 5.5}])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(3)
def test_every_kind_of_run_is_drawn(tmp_path, case, baselines):
    plot_loss(CASES[case], tmp_path / "loss.png", baselines)
    height, width, _ = imread(tmp_path / "loss.png").shape
    assert width == 1200
    assert height == 720
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_axes_legend_and_baselines_say_what_is_drawn():
    figure = figure_of(train(np.linspace(5, 1, 40)) + heldout([3.0, 1.5]), {"trigram model": 2.25})
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "gpt"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per byte)")
    assert legend(figure) == ["train, smoothed", "heldout: 1.5 at the end", "trigram model: 2.25"]
    baseline = axes.lines[-1]
    np.testing.assert_array_equal(baseline.get_ydata(), [2.25, 2.25])
    assert baseline.is_dashed()


def test_a_baseline_far_from_the_curve_stays_in_view():
    low, high = figure_of(train([2.0, 1.0]), {"uniform": 5.55}).axes[0].get_ylim()
    assert low < 1.0 < 5.55 < high


def test_losses_that_are_not_finite_are_counted_and_marked_at_their_steps():
    figure = figure_of(train([3.0, math.nan, 2.0, math.inf]))
    assert "not finite: 2" in legend(figure)
    (marks,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    np.testing.assert_array_equal(marks.get_xdata(), [2, 4])


def test_a_long_run_is_thinned_but_keeps_its_spikes():
    values = 2 + np.sin(np.arange(100_000))
    values[77_777] = 50.0
    axes = figure_of(train(values)).axes[0]
    raw, smoothed = axes.lines
    assert np.size(raw.get_xdata()) <= MAX_POINTS
    assert np.size(smoothed.get_xdata()) <= MAX_POINTS
    assert np.max(raw.get_ydata()) == 50.0
    assert axes.get_ylim()[1] < 10  # one spike does not flatten the rest


def test_smoothing_has_no_lag_on_a_line_and_shortens_noise():
    line = np.arange(100.0)
    np.testing.assert_allclose(smooth(line, 5)[:95], line[:95])
    noise = np.random.default_rng(0).normal(size=2000)
    assert smooth(noise, 50)[100:-100].std() < 0.2


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(RunError, match=r"absent/loss.png: No such file or directory; the metrics"):
        plot_loss([], tmp_path / "absent" / "loss.png")
