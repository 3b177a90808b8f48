"""`jaxdist parity`: every exact way to train gives the numbers of one device, or says where not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxdist.experiment import load
from jaxdist.launch.parity_cells import cover, possible_cells, valid_cells
from jaxdist.launch.parity_report import HEADER, line, to_json
from jaxdist.launch.parity_run import (
    BUILT_IN,
    Result,
    compare,
    open_subject,
    remats_of,
    sections_of,
)
from jaxdist.metrics.report import write_json

BUILT_IN_NAME = "A gpt of 8 layers of width 32"


def parity(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    full: bool = False,
    json_file: Path | None = None,
    console: Console,
) -> list[Result]:
    """Compare combinations with one device, print a line each as it is done, and the verdict.

    Args:
      path: a config, whose model and data are compared; None is a small language model.
      full: every combination, not only enough of them to have every two settings.
      json_file: where to write the same as JSON, what there is of it after each combination.

    Raises:
      JaxdistError: a config that cannot be read, or not be built on one device.
    """
    sections, name = BUILT_IN, BUILT_IN_NAME
    if path is not None:
        sections, name = sections_of(*load(path, overrides)), " ".join([str(path), *overrides])
    subject = open_subject(sections)
    remats = remats_of(sections)
    cells = valid_cells(remats) if full else cover([*possible_cells(remats)])
    console.print(
        f"{name}: {len(cells)} combinations on 8 fake devices against one device,\n"
        f"float32, relative differences",
        soft_wrap=True,
    )
    console.print(HEADER, style="bold")
    results: list[Result] = []

    def note() -> None:
        if json_file is not None:
            report = to_json(name, results, planned=len(cells), full=full)
            write_json(json_file, report, what="comparison", indent=1, allow_nan=True)

    note()
    for cell in cells:
        results.append(_shown(compare(subject, cell), console))
        note()
    console.print(verdict(results))
    return results


def _shown(result: Result, console: Console) -> Result:
    style = "bold red" if result.verdict == "differs" else None
    console.print(line(result), style=style, soft_wrap=True, markup=False)
    return result


def verdict(results: Sequence[Result]) -> str:
    """How many are equal, differ, were skipped.

    >>> verdict([Result(cell, "skipped") for cell in valid_cells()[:2]])
    '0 equal, 0 differ, 2 skipped'
    """
    counts = [
        sum(result.verdict == kind for result in results)
        for kind in ("equal", "differs", "skipped")
    ]
    return "{} equal, {} differ, {} skipped".format(*counts)
