"""Pipeline schedules: their formulas, torch's own schedules, and threads that sleep them."""

from __future__ import annotations

from jaxdist.bench import pipeline_auto, pipeline_formulas, pipeline_threads, pipeline_torch
from jaxdist.bench.report import Report


def bench() -> Report:
    """Simulated time lines beside formulas, the zero-bubble paper, torch and the clock."""
    figures, listings = [], []
    # Threads first: what they wait for should not be this process's garbage.
    played = pipeline_threads.measure()
    for part, found in (
        (pipeline_formulas, pipeline_formulas.measure()),
        (pipeline_auto, pipeline_auto.measure()),
        (pipeline_torch, pipeline_torch.measure()),
        (pipeline_threads, played),
    ):
        figures += part.figures(found)
        if found:
            listings.append(part.listing(found))
    return Report("pipeline", figures, listings)
