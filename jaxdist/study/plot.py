"""The plot of a study's metric over the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.metrics.figure import new_figure
from jaxdist.study.plan import StudyCell
from jaxdist.study.table import by_row, metric_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#6b6b6b", "#b07d2b", "#3c8d5a", "#d1495b", "#2a6fb0", "#8b5fbf")
_MARKERS = ("s", "D", "^", "o", "v", "P")
_SIZE_INCHES = (9.6, 5.2)
_ERRORS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 90)
_PANELS = {False: "learning rate by the rule, untuned", True: "learning rate tuned at each batch"}


def batch_scaling_figure(cells: Sequence[StudyCell], *, title: str) -> Figure:
    """Return a figure with the mean and the range of the metric by batch size.

    Args:
      cells: the cells of a study.
      title: the title of the figure.
    """
    panels = sorted({cell.tuned for cell in cells})
    figure = new_figure(_SIZE_INCHES)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, tuned in zip(grid[0], panels, strict=True):
        _draw(axes, [cell for cell in cells if cell.tuned == tuned])
        axes.set_title(_PANELS[tuned], loc="left", fontsize=12)
    if metric_of(cells) == "accuracy":
        _show_accuracy(grid[0][0], _heights(cells))
    else:
        grid[0][0].set_ylabel("held-out loss (nats)", fontsize=12)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=11)
    return figure


def _heights(cells: Sequence[StudyCell]) -> np.ndarray:
    """Return the heights of points, `[cells, runs]`: losses, or errors in percent."""
    values = np.array([cell.values for cell in cells])
    return 100 * (1 - values) if metric_of(cells) == "accuracy" else values


def _show_accuracy(axes: Axes, errors: np.ndarray) -> None:
    """Give the vertical axis an inverted log scale of errors, with accuracies as labels.

    The difference between accuracies of 98% and 99% is then visible.

    Args:
      axes: the axes whose vertical axis is changed.
      errors: the errors in percent, `[cells, runs]`.
    """
    axes.set_yscale("log", nonpositive="clip")
    known = errors[errors > 0]
    low, high = (known.min(), known.max()) if known.size else (1, 10)
    ticks = [tick for tick in _ERRORS if low / 2 < tick < high * 2]
    axes.set_yticks(ticks, [f"{100 - tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_ylim(min(high * 1.3, 100), low / 1.3)
    axes.set_ylabel("held-out accuracy (%), error on a log scale", fontsize=12)


def _draw(axes: Axes, cells: Sequence[StudyCell]) -> None:
    rows = by_row(cells)
    for index, ((name, _), row) in enumerate(rows.items()):
        # Points are shifted by a few percent, so that bars at the same batch size do not hide each
        # other.
        aside = 1.03 ** (index - (len(rows) - 1) / 2)
        sizes = aside * np.array([cell.batch_size for cell in row], float)
        heights = _heights(row)
        means = heights.mean(axis=1)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.errorbar(
            sizes,
            means,
            yerr=[means - heights.min(axis=1), heights.max(axis=1) - means],
            color=colour,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=6,
            markeredgecolor="white",
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
            label=name,
        )
        broken = np.array([cell.diverged > 0 for cell in row])
        bottom = np.full(broken.sum(), 0.02)
        axes.plot(sizes[broken], bottom, "x", color=colour, transform=axes.get_xaxis_transform())
    _label_sizes(axes, sorted({cell.batch_size for cell in cells}))


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("batch size", fontsize=12)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
