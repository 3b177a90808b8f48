"""The picture of the loss over virtual time and over steps, and of the staleness."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.simulation.compared import SimulatedVariant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "simulation"
_SIZE_INCHES = (13.0, 4.6)


def plot_simulation(
    rows: Sequence[SimulatedVariant],
    directory: str | os.PathLike[str],
    *,
    title: str,
    target: float,
) -> list[Path]:
    """Draw the variants' runs, and return the paths of the files.

    `jaxdist.metrics.figure.save_figure` writes the files.

    Args:
      rows: the variants; the curves show the first seed, and the histograms all seeds.
      title: the text above the axes.
      target: the loss that a dashed line marks.
    """
    figure = simulation_figure(rows, title=title, target=target)
    return save_figure(figure, directory, NAME, what="the simulation")


def simulation_figure(rows: Sequence[SimulatedVariant], *, title: str, target: float) -> Figure:
    """Return the figure that `plot_simulation` writes, for a notebook or another format."""
    import matplotlib as mpl

    figure = new_figure(_SIZE_INCHES)
    over_time, over_steps, stale = figure.subplots(1, 3)
    few = len(rows) <= 10
    places = np.arange(len(rows)) if few else np.linspace(0, 1, len(rows))
    colours = mpl.colormaps["tab10" if few else "turbo"](places)
    for row, colour in zip(rows, colours, strict=True):
        curve = row.reports[0].curve
        losses = [point.loss for point in curve]
        name = row.variant.name
        over_time.plot([p.seconds for p in curve], losses, color=colour, label=name, linewidth=1.6)
        over_steps.plot([p.steps for p in curve], losses, color=colour, linewidth=1.6)
        _draw_staleness(stale, row, colour)
    for axes, label in ((over_time, "virtual seconds"), (over_steps, "steps")):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.axhline(target, color="#6b6b6b", linestyle="--", linewidth=1)
        axes.set_xlabel(label, fontsize=12)
    over_time.set_ylabel("held-out loss (nats)", fontsize=12)
    stale.set_xlabel("staleness (updates)", fontsize=12)
    stale.set_ylabel("share of changes at most so stale", fontsize=12)
    for axes in (over_time, over_steps, stale):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=min(len(rows), 6), frameon=False, fontsize=11)
    return figure


def _draw_staleness(axes: Axes, row: SimulatedVariant, colour: np.ndarray) -> None:
    """Draw the staleness of a variant as a cumulative histogram.

    Several cumulative histograms remain distinguishable in one figure.
    """
    counts = sum((report.staleness for report in row.reports), Counter[int]())
    ages = np.arange(max(counts, default=0) + 1)
    shares = np.cumsum([counts[age] for age in range(len(ages))]) / max(sum(counts.values()), 1)
    axes.step(ages, shares, where="post", color=tuple(colour), linewidth=1.6)
