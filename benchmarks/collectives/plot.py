"""A plot of the time of collectives over their size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.core.report import show
from jaxdist.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (
    *("#6b6b6b", "#2a6fb0", "#2f8f8f", "#d1495b", "#b07d2b", "#3c8d5a", "#8b5fbf", "#a0527d"),
)
_SIZE_INCHES = (8.0, 5.4)
NAME = "collectives"


def plot_time_over_size(
    seconds: Mapping[str, Mapping[int, float]],
    directory: str | os.PathLike[str],
    *,
    title: str,
) -> list[Path]:
    """Draw a line per algorithm on logarithmic scales, with `jaxdist.metrics.figure.save_figure`.

    Args:
      seconds: for each algorithm, the seconds by number of bytes.
      title: the text above the axes.
    """
    return save_figure(
        time_over_size(seconds, title=title), directory, NAME, what="bench collectives"
    )


def time_over_size(seconds: Mapping[str, Mapping[int, float]], *, title: str) -> Figure:
    """Return the figure that `plot_time_over_size` writes, for a notebook or another format."""
    figure = new_figure(_SIZE_INCHES)
    axes = figure.add_subplot(xscale="log", yscale="log")
    for index, (name, by_bytes) in enumerate(seconds.items()):
        axes.plot(
            list(by_bytes),
            list(by_bytes.values()),
            "o-" if index else "s--",
            color=_COLOURS[index % len(_COLOURS)],
            markersize=5,
            markeredgecolor="white",
            linewidth=1.6,
            label=name.strip("{}").removeprefix("type: "),
        )
    sizes = sorted({size for by_bytes in seconds.values() for size in by_bytes})
    axes.set_xticks(sizes, [show(size, "B") for size in sizes], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: show(value, "s"))
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=10)
    axes.set_xlabel("bytes on each device", fontsize=12)
    axes.set_ylabel("time", fontsize=12)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if seconds:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return figure
