"""Figures of matplotlib, made without pyplot, because pyplot has global state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.errors import RunError, os_errors_as

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(size_inches: tuple[float, float]) -> Figure:
    """Return an empty figure of 150 dots per inch, with constrained layout."""
    # matplotlib is imported here, because its import is slow and only a drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(
    figure: Figure,
    directory: str | os.PathLike[str],
    name: str,
    *,
    formats: Sequence[str] = ("png", "svg"),
    what: str,
) -> list[Path]:
    """Write a figure as `NAME.png` and in other formats, and return the paths.

    Args:
      directory: the directory of the files, which is created if it is missing.
      what: the description of the figure in the error message.

    Raises:
      RunError: the files cannot be written.
    """
    paths = [Path(directory) / f"{name}.{format}" for format in formats]
    with os_errors_as(
        RunError, f"cannot write the plot of {what} to {directory}", "choose another directory"
    ):
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, format=path.suffix[1:])
    return paths
