"""Pictures of flight records, with a row for each process and a bar for each phase.

The command `python -m jaxdist.heartbeat.flight.picture RUN/flight_3.json ...` draws each record,
and writes the picture next to the record.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.metrics.figure import new_figure, save_figure
from jaxdist.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "step": "#2a6fb0",
    "wait": "#c3d8ec",
    "input_wait": "#e08e2b",
    "evaluation": "#3c8d5a",
    "checkpoint_blocked": "#8b5a2b",
    "snapshot": "#8b5fbf",
    "replica_check": "#d477a4",
    "compile": "#6b6b6b",
    "start": "#a8a8a8",
    "recovery": "#2f8f8f",
    "lost_work": "#000000",
    "idle": "#e6e6e6",
}
NAMES = {"step": "step: dispatch", "wait": "step: wait for devices"}
_LOST = "#c1121f"
_WIDTH_INCHES, _ROW_INCHES, _MOST_INCHES = 10.0, 0.42, 40.0


def draw_flight(record: JsonObject, directory: str | os.PathLike[str]) -> list[Path]:
    """Draw a record of `jaxdist.heartbeat.flight.recorder`, and return the files written."""
    name = f"flight_{record['generation']}"
    return save_figure(
        flight_figure(record), directory, name, formats=("png",), what="the flight record"
    )


def flight_figure(record: JsonObject) -> Figure:
    """Return the figure that `draw_flight` writes for a record."""
    processes = record["processes"]
    height = min(1.9 + _ROW_INCHES * len(processes), _MOST_INCHES)
    figure = new_figure((_WIDTH_INCHES, height))
    axes = figure.add_subplot()
    begin, end = _shown(processes)
    unit, scale = ("ms", 1e3) if -begin < 2 else ("s", 1.0)
    seen: dict[str, None] = {}
    for row, one in enumerate(processes):
        _draw_row(axes, row, one, (begin, end), scale, seen)
        if one["process"] == record["process"]:
            _mark(axes, row, one, (begin, end), scale)
    axes.set_xlim(scale * begin, scale * end)
    axes.set_ylim(len(processes) - 0.4, -0.6)
    labels = [f"process {one['process']}, step {one['step']}" for one in processes]
    axes.set_yticks(range(len(processes)), labels)
    for label, one in zip(axes.get_yticklabels(), processes, strict=True):
        if one["process"] == record["process"]:
            label.set(color=_LOST, fontweight="bold")
    axes.xaxis.set_major_formatter(lambda value, _: f"{-value:g}" if value else "0")
    axes.set_xlabel(f"{unit} before the agent saw it", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"Generation {record['generation']}: process {record['process']} {record['how']}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=8)
    _legend(figure, seen)
    return figure


def _shown(processes: Sequence[JsonObject]) -> tuple[float, float]:
    """Return the first and the last second to show; most of a long last phase is cut off."""
    rows = [one["phases"] for one in processes if one["phases"]]
    if not rows:
        return -1.0, 0.0
    begin = max(row[0]["begin"] for row in rows)
    turned = max(row[-1]["begin"] for row in rows)
    begin = min(begin, turned)
    end = max(row[-1]["begin"] + row[-1]["seconds"] for row in rows)
    end = max(end, turned)
    longest = max(0.4 * (turned - begin), 0.05)
    if end - turned > longest:
        end = turned + longest
    return begin, max(end, begin + 1e-3)


def _draw_row(
    axes: Axes,
    row: int,
    one: JsonObject,
    shown: tuple[float, float],
    scale: float,
    seen: dict[str, None],
) -> None:
    bars: dict[str, list[tuple[float, float]]] = {}
    for phase in one["phases"]:
        first = max(phase["begin"], shown[0])
        last = min(phase["begin"] + phase["seconds"], shown[1])
        if last > first:
            bars.setdefault(phase["phase"], []).append((scale * first, scale * (last - first)))
    for name, given in bars.items():
        seen.setdefault(name)
        axes.broken_barh(given, (row - 0.4, 0.8), facecolors=COLOURS[name], linewidth=0)


def _mark(axes: Axes, row: int, one: JsonObject, shown: tuple[float, float], scale: float) -> None:
    """Mark the end of the process that failed or was stuck, in the row of the process.

    Args:
      axes: the axes of the picture.
      row: the index of the row.
      one: the process, as in a flight record.
      shown: the first and the last second that the picture shows.
      scale: the number of units of the time axis in a second.
    """
    if not one["phases"]:
        return
    last = one["phases"][-1]
    begin = min(max(last["begin"], shown[0]), shown[1])
    end = min(last["begin"] + last["seconds"], shown[1])
    frame = [(scale * begin, scale * max(end - begin, 0.004 * (shown[1] - shown[0])))]
    axes.broken_barh(frame, (row - 0.4, 0.8), facecolors="none", edgecolors=_LOST, linewidth=2)
    told = last["phase"].replace("_", " ")
    if last["seconds"] >= 0.001:
        told += f" for {last['seconds']:.2g} s"
    if one["silent_seconds"] > 1:
        told += f", then silent for {one['silent_seconds']:.2g} s"
    axes.annotate(
        told,
        (scale * begin, row),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
        color="white",
        fontweight="bold",
        bbox={"facecolor": _LOST, "edgecolor": "none", "boxstyle": "round,pad=0.25"},
    )


def _legend(figure: Figure, seen: dict[str, None]) -> None:
    from matplotlib.patches import Patch

    names = [name for name in COLOURS if name in seen]
    handles = [
        Patch(color=COLOURS[name], label=NAMES.get(name, name.replace("_", " "))) for name in names
    ]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9
        )


def main(paths: Sequence[str]) -> None:
    """Draw the records in these files, at the lowest priority of the scheduler."""
    os.nice(19)
    for path in map(Path, paths):
        draw_flight(json.loads(path.read_text(encoding="utf-8")), path.parent)


if __name__ == "__main__":
    main(sys.argv[1:])
