"""Pipelines: schedules beside formulas, papers and torch; the executor beside what they promise."""

from __future__ import annotations

from jaxdist.bench import (
    pipeline_auto,
    pipeline_formulas,
    pipeline_memory,
    pipeline_pod,
    pipeline_race,
    pipeline_sleep,
    pipeline_threads,
    pipeline_torch,
    pipeline_work,
)
from jaxdist.bench.report import Report

PARTS = (
    pipeline_formulas,
    pipeline_auto,
    pipeline_torch,
    pipeline_threads,
    pipeline_sleep,
    pipeline_work,
    pipeline_memory,
    pipeline_race,
    pipeline_pod,
)
"""Each measures, and has the figures and the listing of what it found."""


def bench() -> Report:
    """All parts."""
    # Threads first: what they wait for should not be this process's garbage.
    turns = sorted(PARTS, key=lambda part: part is not pipeline_threads)
    found = {part: part.measure() for part in turns}
    figures = [figure for part in PARTS for figure in part.figures(found[part])]
    listings = [part.listing(found[part]) for part in PARTS if found[part]]
    return Report("pipeline", figures, listings)
