"""The picture of a run's loss, as curves over the steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.errors import RunError, os_errors_as
from jaxdist.metrics.figure import new_figure
from jaxdist.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 2000
"""The largest number of points of a curve. A picture has about this many columns; longer curves are
thinned.
"""

_TRAIN, _POINTS = "#2a6fb0", ("#d1495b", "#3c8d5a", "#8b5fbf")
_BASELINES = ("#6b6b6b", "#b07d2b", "#2f8f8f", "#a0527d")
_SIZE_INCHES = (8.0, 4.8)


def plot_loss(
    records: Iterable[Mapping[str, Json]],
    path: str | os.PathLike[str],
    baselines: Mapping[str, float] | None = None,
    *,
    title: str = "Loss",
    loss_unit: str | None = "nats",
) -> None:
    """Draw the train loss, raw and smoothed, the loss of the other splits, and the baselines.

    Args:
      records: the records of `read_metrics`; records without a `loss` are ignored.
      path: the path of the PNG, which is replaced atomically.
      baselines: the losses of baselines by label, each of which is drawn as a dashed horizontal
        line, or None for no baselines.
      title: the text above the axes.
      loss_unit: the unit of the loss, for example "nats per token", or None if it is unknown.

    Raises:
      RunError: the picture cannot be written.
    """
    figure = loss_figure(records, baselines or {}, title=title, loss_unit=loss_unit)
    temporary = Path(path).with_suffix(".tmp")
    with os_errors_as(
        RunError,
        f"the loss curve cannot be written to {path}",
        "the metrics themselves are safe: free some space or restore the directory, then "
        "repeat the command with --resume",
    ):
        figure.savefig(temporary, format="png")
        temporary.replace(path)


def loss_figure(
    records: Iterable[Mapping[str, Json]],
    baselines: Mapping[str, float],
    *,
    title: str,
    loss_unit: str | None,
) -> Figure:
    """Return the figure that `plot_loss` writes, for a notebook or another format."""
    figure = new_figure(_SIZE_INCHES)
    axes = figure.add_subplot()
    losses = _losses_by_split(records)
    steps, values = losses.pop("train", (np.empty(0), np.empty(0)))
    finite = np.isfinite(values)
    heights = _draw_train(axes, steps[finite], values[finite])
    # The zips are not strict, because there are more colors than lines.
    for (split, points), colour in zip(losses.items(), _POINTS * 3, strict=False):
        heights += _draw_points(axes, split, *points, colour)
    for (label, value), colour in zip(baselines.items(), _BASELINES * 3, strict=False):
        axes.axhline(value, color=colour, linestyle=(0, (5, 3)), label=f"{label}: {value:.3g}")
        heights.append(value)
    _draw_broken(axes, steps[~finite])
    _set_range(axes, heights)
    _label(axes, title, loss_unit)
    if heights or len(steps):
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    return figure


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Return, for each value, the mean of the value and of its neighbors on both sides.

    A value has `reach` neighbors on each side, or fewer near the ends. Near the start, both sides
    have equally many neighbors, so that the first value is unchanged. Near the end, only the right
    side has fewer neighbors.

    >>> smooth(np.array([9.0, 3.0, 3.0, 0.0]), reach=1).tolist()
    [9.0, 5.0, 2.0, 1.5]
    """
    index = np.arange(len(values))
    side = np.minimum(index, reach)
    first, end = index - side, np.minimum(index + side + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[first]) / (end - first)


def thin(
    steps: np.ndarray, values: np.ndarray, most: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points: the lowest and the highest point of each group of neighbors.

    >>> steps, values = thin(np.arange(10_000), np.eye(1, 10_000, 777)[0])
    >>> len(steps) <= MAX_POINTS, steps[values.argmax()].item()
    (True, 777)
    """
    if len(steps) <= most:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), most // 2)
    ends = [{int(g[values[g].argmin()]), int(g[values[g].argmax()])} for g in groups]
    kept = np.array(sorted(index for pair in ends for index in pair))
    return steps[kept], values[kept]


def _losses_by_split(
    records: Iterable[Mapping[str, Json]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if "loss" in record:
            points.setdefault(record["split"], []).append((record["step"], record["loss"]))
    arrays = {split: np.array(pairs, dtype=np.float64).T for split, pairs in points.items()}
    return {split: (steps, values) for split, (steps, values) in arrays.items()}


def _draw_train(axes: Axes, steps: np.ndarray, values: np.ndarray) -> list[float]:
    """Draw the train loss, and return the losses that the vertical axis must include."""
    if not len(steps):
        return []
    smoothed = smooth(values, len(steps) // 60)
    if len(steps) == 1:
        axes.plot(steps, values, "o", color=_TRAIN, label="train")
    else:
        every = -(-len(steps) // MAX_POINTS)
        axes.plot(*thin(steps, values), color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps[::every], smoothed[::every], color=_TRAIN, linewidth=2, label="train, smoothed"
        )
    # A rare spike is cut off, since it would flatten the rest of the curve.
    low, high = np.percentile(values, [0.2, 99.8])
    return [float(low), float(high), float(smoothed.min()), float(smoothed.max())]


def _draw_broken(axes: Axes, steps: np.ndarray) -> None:
    """Draw a mark at the bottom for each step whose train loss is not finite."""
    if len(steps):
        axes.plot(
            steps,
            np.full(len(steps), 0.03),
            "x",
            color="#c1121f",
            transform=axes.get_xaxis_transform(),
            label=f"not finite: {len(steps)}",
        )


def _draw_points(
    axes: Axes, split: str, steps: np.ndarray, values: np.ndarray, colour: str
) -> list[float]:
    finite = np.isfinite(values)
    if not finite.any():
        return []
    last = values[finite][-1]
    axes.plot(
        steps[finite],
        values[finite],
        "o-",
        color=colour,
        markersize=6 if finite.sum() <= 50 else 3,
        markeredgecolor="white",
        linewidth=1.2,
        label=f"{split}: {last:.3g} at the end",
        zorder=3,
    )
    return [float(values[finite].min()), float(values[finite].max())]


def _set_range(axes: Axes, heights: list[float]) -> None:
    if not heights:
        axes.text(
            0.5, 0.5, "no loss recorded yet", ha="center", va="center", transform=axes.transAxes
        )
        return
    low, high = min(heights), max(heights)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
    first, last = axes.dataLim.intervalx
    # A short axis is made longer, so that its ticks are whole steps.
    if 0 <= last - first < 2:
        axes.set_xlim(first - 1, last + 1)


def _label(axes: Axes, title: str, loss_unit: str | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=10)
    axes.set_xlabel("step", fontsize=12)
    axes.set_ylabel("loss" if loss_unit is None else f"loss ({loss_unit})", fontsize=12)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
