"""A simulation's report as text of at most 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxdist.simulation.engine.report import Point, Report

ROWS = 12
"""The largest number of rows of the curve's table and of the histogram."""
_BAR = 40


def simulation_table(report: Report) -> str:
    """Format the curve, the staleness, the workers, the servers and the checks of a report."""
    parts = (_curve(report.curve), _staleness(report), _workers(report), _servers(report))
    return "\n".join([*(line for part in parts for line in (*part, "")), *_checks(report)])


def _curve(curve: Sequence[Point]) -> Iterator[str]:
    yield f"{'virtual s':>10}  {'steps':>8}  {'updates':>8}  {'loss':>9}"
    for point in thinned(curve, ROWS):
        yield f"{point.seconds:>10.4g}  {point.steps:>8.6g}  {point.updates:>8}  {point.loss:>9.5g}"


def thinned(curve: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points at even distances, including the first and the last point."""
    if len(curve) <= most:
        return list(curve)
    return [curve[round(at * (len(curve) - 1) / (most - 1))] for at in range(most)]


def _staleness(report: Report) -> Iterator[str]:
    per_step, counts = report.updates_per_step, report.staleness
    unit = f"; {per_step} updates are a step of all workers" if per_step > 1 else ""
    yield (
        f"staleness in updates: mean {report.mean_staleness:.3g}, at most "
        f"{max(counts, default=0)}{unit}"
    )
    total = max(sum(counts.values()), 1)
    for name, count in binned(counts, ROWS):
        share = count / total
        yield f"{name:>10}  {share:>6.1%}  {'#' * round(share * _BAR)}".rstrip()


def binned(counts: Counter[int], most: int) -> list[tuple[str, int]]:
    """Return a histogram with at most `most` bins of equal width; the first bin begins at 0.

    >>> binned(Counter({0: 2, 3: 1, 4: 1}), 3)
    [('0-1', 2), ('2-3', 1), ('4-5', 1)]
    """
    width = -(-(max(counts, default=0) + 1) // most)
    found: Counter[int] = Counter()
    for age, count in counts.items():
        found[age // width] += count
    names = {at: f"{at * width}-{at * width + width - 1}" if width > 1 else str(at) for at in found}
    return [(names[at], found[at]) for at in sorted(found)]


def _workers(report: Report) -> Iterator[str]:
    yield f"{'worker':>6}  {'gradients':>9}  {'busy s':>8}  {'idle s':>8}  {'idle':>4}  crashes"
    for number, one in enumerate(report.work):
        yield (
            f"{number:>6}  {one.gradients:>9}  {one.busy_seconds:>8.3g}  "
            f"{one.idle_seconds:>8.3g}  {one.idle_share:>4.0%}  {one.crashes or '':>7}".rstrip()
        )


def _servers(report: Report) -> Iterator[str]:
    yield f"{'server':>6}  {'MB in':>9}  {'MB out':>9}"
    for number, pair in enumerate(zip(report.received_bytes, report.sent_bytes, strict=True)):
        yield f"{number:>6}  {pair[0] / 1e6:>9.4g}  {pair[1] / 1e6:>9.4g}"
    if report.rack_received_bytes:
        yield f"{'rack':>6}  {'MB in':>9}"
    for number, size in enumerate(report.rack_received_bytes):
        yield f"{number:>6}  {size / 1e6:>9.4g}"


def _checks(report: Report) -> Iterator[str]:
    bound = "no bound" if report.bound is None else f"the bound is {report.bound}"
    yield f"{report.reads} reads checked: at most {report.largest_lead} clocks old; {bound}"
    for reason, count in report.dropped.items():
        yield f"{count} changes dropped: {reason}"
    if report.lost:
        yield f"{report.lost} messages lost and sent again"
    last = report.curve[-1]
    yield f"loss {last.loss:.5g} after {last.steps:g} steps, {report.seconds:.5g} virtual seconds"
