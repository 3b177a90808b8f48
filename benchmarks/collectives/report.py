"""The bench of collectives: bytes compared with formulas, and time with psum and with gloo."""

from __future__ import annotations

import os
from contextlib import nullcontext

import jax

from benchmarks.collectives import gloo as collectives_gloo
from benchmarks.collectives import lab as collectives_lab
from benchmarks.collectives import plot as collectives_plot
from benchmarks.collectives import time as collectives_time
from benchmarks.collectives import traffic as collectives_traffic
from benchmarks.collectives.traffic import TrafficRow
from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Figure, Report, lacking

FUSION_REPEATS = 5
"""The largest number of repeats of fusion, which is small because a repeat takes seconds."""


def bench(
    repeats: int = REPEATS, plot: str | os.PathLike[str] | None = None, lab: bool = False
) -> Report:
    """Compare bytes and steps with formulas, and rings with psum and gloo; time fusion and sizes.

    Args:
      repeats: timed pairs of each figure.
      plot: a directory for the picture of time over size, as PNG and SVG; None draws none.
      lab: whether to measure only the time between hosts on slow links (see scripts/lab).
    """
    if lab:
        return collectives_lab.bench()
    devices = jax.devices()
    figures, rows = traffic_figures()
    no_torch = lacking("torch")
    with nullcontext() if no_torch else collectives_gloo.gloo(len(devices)) as gloo:
        figures += collectives_time.large_figures(
            devices, gloo, repeats, collectives_time.LARGE_BYTES
        )
        seconds = collectives_time.by_size(
            devices,
            gloo,
            sizes=collectives_time.SIZES,
            algorithms=collectives_time.ALGORITHMS,
        )
    if no_torch:
        figures.append(Figure.skipped("ring over gloo", no_torch))
    for count in collectives_time.TENSOR_COUNTS:
        figures += collectives_time.fusion_figures(devices, count, min(repeats, FUSION_REPEATS))
    if plot is not None:
        title = f"All-reduce of float32, {len(devices)} x {devices[0].device_kind}"
        collectives_plot.plot_time_over_size(seconds, plot, title=title)
    sizes = collectives_time.size_listing(seconds, len(devices))
    return Report("collectives", figures, [sizes, collectives_traffic.listing(rows)])


def traffic_figures() -> tuple[list[Figure], list[TrafficRow]]:
    """Compare compiled programs with the formulas, for CPUs and, with libtpu, for TPUs."""
    rows = collectives_traffic.measure("cpu")
    figures = collectives_traffic.figures("cpu", rows)
    if reason := lacking("libtpu"):
        return [*figures, Figure.skipped("bytes sent, tpu", reason)], rows
    found = collectives_traffic.measure("tpu")
    return figures + collectives_traffic.figures("tpu", found), rows + found
