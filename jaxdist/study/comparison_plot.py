"""A plot of the change of the held-out loss by variant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxdist.metrics.figure import new_figure
from jaxdist.study.comparison import MARGIN, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GOOD, _BAD, _GREY = "#2a6fb0", "#d1495b", "#6b6b6b"
_TICKS = (-50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def comparison_figure(rows: Sequence[VariantResult], *, title: str) -> Figure:
    """Return a figure with the change of the loss for every seed, and its mean.

    Args:
      rows: the rows of a comparison. The first row is the baseline.
      title: the title of the figure.
    """
    others = rows[1:]
    figure = new_figure((9.6, 1.8 + 0.42 * len(others)))
    axes = figure.subplots()
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color=_GREY, alpha=0.15, linewidth=0)
    axes.axvline(0, color=_GREY, linewidth=1)
    for place, row in enumerate(others):
        _draw(axes, place, row)
    labels = [_label(row) for row in others]
    axes.set_yticks(range(len(others)), labels, fontsize=11)
    axes.set_ylim(len(others) - 0.5, -0.5)
    _scale(axes, [100 * c for row in others for c in row.changes if math.isfinite(c)])
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    first = rows[0].variant.name
    axes.set_xlabel(f"held-out loss against {first!r}, change in % (grey: within 1%)", fontsize=12)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
    return figure


def _label(row: VariantResult) -> str:
    if row.relative_bytes is None:
        return row.variant.name
    return f"{row.variant.name}\n{100 * row.relative_bytes:.3g}% of the bytes"


def _draw(axes: Axes, place: int, row: VariantResult) -> None:
    if not math.isfinite(row.changes[0]):
        axes.plot([0.98], [place], "x", color=_BAD, transform=axes.get_yaxis_transform())
        return
    changes = [100 * change for change in row.changes]
    mean = statistics.fmean(changes)
    colour = _GOOD if mean <= 100 * MARGIN else _BAD
    axes.plot([min(changes), max(changes)], [place, place], color=colour, linewidth=1.4)
    axes.plot(changes, [place] * len(changes), "o", color=colour, alpha=0.45, markersize=5)
    axes.plot([mean], [place], "D", color=colour, markersize=8, markeredgecolor="white")


def _scale(axes: Axes, changes: Sequence[float]) -> None:
    """Make the horizontal axis linear within 1% and logarithmic beyond.

    Changes of 0.5% and of 50% are then both visible.
    """
    low, high = min([-1.0, *changes]), max([1.0, *changes])
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.7)
    axes.set_xlim(low * 1.3, high * 1.3)
    ticks = [tick for tick in _TICKS if low * 1.3 <= tick <= high * 1.3]
    axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], minor=False)
    axes.minorticks_off()
