"""The bench of pipelines: schedules compared with formulas, papers and torch, and the executor."""

from __future__ import annotations

from benchmarks.core.report import Report
from benchmarks.pipeline import (
    auto,
    formulas,
    memory,
    pod,
    race,
    sleep,
    threads,
    torch_tables,
    work,
)

PARTS = (
    formulas,
    auto,
    torch_tables,
    threads,
    sleep,
    work,
    memory,
    race,
    pod,
)
"""The modules of the bench, each with functions `measure`, `figures` and `listing`."""


def bench() -> Report:
    """Measure all parts, and report them."""
    # Threads are timed first, when this process has little garbage whose collection would delay
    # them.
    turns = sorted(PARTS, key=lambda part: part is not threads)
    found = {part: part.measure() for part in turns}
    figures = [figure for part in PARTS for figure in part.figures(found[part])]
    listings = [part.listing(found[part]) for part in PARTS if found[part]]
    return Report("pipeline", figures, listings)
