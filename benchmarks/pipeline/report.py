"""Pipelines: schedules beside formulas, papers and torch; the executor beside what they promise."""

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
"""Each measures, and has the figures and the listing of what it found."""


def bench() -> Report:
    """All parts."""
    # Threads first: what they wait for should not be this process's garbage.
    turns = sorted(PARTS, key=lambda part: part is not threads)
    found = {part: part.measure() for part in turns}
    figures = [figure for part in PARTS for figure in part.figures(found[part])]
    listings = [part.listing(found[part]) for part in PARTS if found[part]]
    return Report("pipeline", figures, listings)
