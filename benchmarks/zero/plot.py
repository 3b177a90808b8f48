"""A plot of figure 1 of the ZeRO paper, from compiled programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.zero.paper import PaperRow
from jaxdist.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "zero_memory"
_SIZE_INCHES = (8.0, 4.4)
_BARS = {"formula": "#b9bec4", "explicit": "#2a6fb0", "auto": "#d9a441"}
_LABELS = {
    "formula": "formula of the paper (states alone)",
    "explicit": "jaxdist, explicit collectives",
    "auto": "plain sharding constraints",
}
_STAGES = {0: "0: replicas", 1: "1: optimizer", 2: "2: + gradients", 3: "3: + parameters"}


def plot_memory(rows: Sequence[PaperRow], directory: str | os.PathLike[str]) -> Path:
    """Draw the peak of each stage with the peak by formula, and return the SVG file.

    Args:
      rows: the rows of the figure, at least one.
    """
    return save_figure(memory(rows), directory, NAME, formats=("svg",), what="bench zero")[0]


def memory(rows: Sequence[PaperRow]) -> Figure:
    """Return the figure that `plot_memory` writes, for a notebook or another format."""
    from matplotlib.patches import Patch

    figure = new_figure(_SIZE_INCHES)
    axes = figure.add_subplot()
    stages = sorted({row.stage for row in rows})
    formula = {row.stage: row.formula_bytes for row in rows}
    series = {"formula": {stage: (formula[stage], False) for stage in stages}}
    for row in rows:
        series.setdefault(row.form, {})[row.stage] = (row.peak_bytes, row.refused)
    for place, (name, bars) in enumerate(series.items()):
        _draw(axes, name, bars, stages, place - (len(series) - 1) / 2, 0.8 / len(series))
    limits = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    if limits:
        axes.axhline(limits[0] / 1e9, color="#d1495b", linewidth=1.2, linestyle="--")
        text = f"memory of a chip, {limits[0] / 1e9:.1f} GB"
        place = (len(stages) - 0.55, limits[0] / 1e9)
        axes.annotate(
            text, place, (0, 4), textcoords="offset points", ha="right", color="#d1495b", fontsize=9
        )
    params = rows[0].params / 1e9
    title = f"{params:.2f} billion parameters on 64 TPU v5p: peak memory of a device"
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.set_xticks(range(len(stages)), [_STAGES[stage] for stage in stages])
    axes.set_xlabel("ZeRO stage", fontsize=11)
    axes.set_ylabel("GB", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.14)
    # Separate patches, since a legend copies the style of the first bar, which may be hatched.
    handles = [Patch(color=_BARS[name], label=_LABELS[name]) for name in series]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure


def _draw(
    axes: Axes,
    name: str,
    bars: dict[int, tuple[float, bool]],
    stages: Sequence[int],
    shift: float,
    width: float,
) -> None:
    """Draw a labelled bar for each stage, hatched where the compiler refuses the program."""
    places = [stages.index(stage) + shift * width for stage in bars]
    heights = [size / 1e9 for size, _ in bars.values()]
    drawn = axes.bar(places, heights, 0.92 * width, color=_BARS[name])
    texts = []
    for bar, height, (_, refused) in zip(drawn, heights, bars.values(), strict=True):
        texts.append(f"{height:.1f}" + ("\nrefused" if refused else ""))
        if refused:
            bar.set(hatch="///", edgecolor="white")
    axes.bar_label(drawn, texts, padding=2, fontsize=8)
