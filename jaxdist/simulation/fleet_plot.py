"""The picture of a fleet's goodput over the interval between saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxdist.simulation.fleet import Fleet

NAME = "fleet"
_SIZE_INCHES = (8.0, 4.8)
_COLOURS = ("#2a6fb0", "#d1495b")
_STYLES = {"Young": "--", "Daly": ":"}


def plot_fleet(fleet: Fleet, directory: str | os.PathLike[str]) -> list[Path]:
    """Draw a simulated fleet, and return the paths of the files.

    `jaxdist.metrics.figure.save_figure` writes the files.
    """
    return save_figure(fleet_figure(fleet), directory, NAME, what="the fleet")


def fleet_figure(fleet: Fleet) -> Figure:
    """Return the figure that `plot_fleet` writes: means, percentiles 5 and 95, and closed forms."""
    figure = new_figure(_SIZE_INCHES)
    axes = figure.add_subplot()
    for tier, colour in zip(fleet.tiers, _COLOURS, strict=True):
        spread = np.array([np.percentile(row.goodput, [5, 95]) for row in tier.rows])
        axes.plot(fleet.every, tier.means, "o-", color=colour, markersize=4, label=tier.name)
        axes.fill_between(fleet.every, *spread.T, color=colour, alpha=0.18, linewidth=0)
        axes.plot(fleet.every, tier.formula, color=colour, linewidth=0.9, alpha=0.6)
        for name, best in fleet.marks(tier).items():
            axes.axvline(best, color=colour, linestyle=_STYLES[name], linewidth=1, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("seconds of work between two saves", fontsize=12)
    axes.set_ylabel("goodput", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    config = fleet.config
    title = f"{config.devices:,} devices, a failure every {config.mttf / 3600:.2g} h"
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure
