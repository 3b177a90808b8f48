"""The figures of the review: efficiency and memory against the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.simulation.review.efficiency import Point
from jaxdist.simulation.review.patterns import zero_bytes
from jaxdist.simulation.review.settings import ReviewConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "parameter server": "#d1495b",
    "ring": "#2a6fb0",
    "pipeline": "#3c8d5a",
    "ZeRO 1": "#8b5fbf",
    "ZeRO 3": "#b07d2b",
}


def plot_review(
    points: Sequence[Point],
    config: ReviewConfig,
    directory: Path,
) -> list[Path]:
    """Draw efficiency and memory, with measured points as large circles, and return the files."""
    figure = new_figure((9.6, 4.6))
    left, right = figure.subplots(1, 2)
    for name, colour in _COLOURS.items():
        mine = [point for point in points if point.architecture == name]
        sizes, heights = [p.devices for p in mine], [100 * p.efficiency for p in mine]
        left.plot(sizes, heights, color=colour, marker=".", label=name)
        measured = [one for one in config.measured if one.architecture == name]
        at = [one.devices for one in measured], [100 * one.efficiency for one in measured]
        left.plot(*at, "o", color=colour, markersize=9, markerfacecolor="none", label=None)
    left.set_title("efficiency, circles measured (%)", loc="left", fontsize=12)
    left.set_ylim(0, 105)
    for stage in range(4):
        heights = [zero_bytes(stage, devices) for devices in config.devices]
        right.plot(config.devices, heights, marker=".", label=f"ZeRO {stage}")
    right.set_yscale("log", base=2)
    right.set_title("bytes for each parameter", loc="left", fontsize=12)
    for axes in (left, right):
        _label(axes)
    return save_figure(figure, directory, "review", what="the review")


def _label(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
