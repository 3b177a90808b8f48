"""The bench of compressed gradients: time and bytes of codecs, and train steps on slow links."""

from __future__ import annotations

from benchmarks.compression import codecs, lab_figures, steps
from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Report


def bench(repeats: int = REPEATS, lab: bool = False, torch: str | None = None) -> Report:
    """Measure codecs on one device and reductions over 8, or train steps on slow links.

    Args:
      repeats: timed pairs of each figure.
      lab: whether to measure only train steps between hosts on slow links (see scripts/lab).
      torch: with `lab`, a Python that has torch.
    """
    if lab:
        return lab_figures.bench(torch, repeats)
    found = codecs.bench(repeats)
    return Report(found.bench, [*found.figures, *steps.figures()])
