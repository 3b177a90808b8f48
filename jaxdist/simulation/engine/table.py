"""A simulation's report as text of at most 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxdist.columns import aligned
from jaxdist.simulation.engine.report import Point, Report

ROWS = 12
"""The largest number of rows of the curve's table and of the histogram."""
_BAR = 40


def simulation_table(report: Report) -> str:
    """Format the curve, the staleness, the workers, the servers and the checks of a report."""
    parts = (_curve(report.curve), _staleness(report), _workers(report), _servers(report))
    return "\n".join([*(line for part in parts for line in (*part, "")), *_checks(report)])


def _curve(curve: Sequence[Point]) -> list[str]:
    return aligned(
        ["virtual s", "steps", "updates", "loss"],
        [
            [f"{point.seconds:.4g}", f"{point.steps:.6g}", f"{point.updates}", f"{point.loss:.5g}"]
            for point in thinned(curve, ROWS)
        ],
    )


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


def _workers(report: Report) -> list[str]:
    rows = [
        [
            *(str(number), str(one.gradients), f"{one.busy_seconds:.3g}"),
            *(f"{one.idle_seconds:.3g}", f"{one.idle_share:.0%}", str(one.crashes or "")),
        ]
        for number, one in enumerate(report.work)
    ]
    return aligned(["worker", "gradients", "busy s", "idle s", "idle", "crashes"], rows)


def _servers(report: Report) -> Iterator[str]:
    both = zip(report.received_bytes, report.sent_bytes, strict=True)
    yield from _megabytes(["server", "MB in", "MB out"], both)
    if report.rack_received_bytes:
        yield from _megabytes(["rack", "MB in"], zip(report.rack_received_bytes))


def _megabytes(header: list[str], rows: Iterable[tuple[float, ...]]) -> list[str]:
    return aligned(
        header,
        [[str(at), *(f"{size / 1e6:.4g}" for size in row)] for at, row in enumerate(rows)],
    )


def _checks(report: Report) -> Iterator[str]:
    bound = "no bound" if report.bound is None else f"the bound is {report.bound}"
    yield f"{report.reads} reads checked: at most {report.largest_lead} clocks old; {bound}"
    for reason, count in report.dropped.items():
        yield f"{count} changes dropped: {reason}"
    if report.lost:
        yield f"{report.lost} messages lost and sent again"
    last = report.curve[-1]
    yield f"loss {last.loss:.5g} after {last.steps:g} steps, {report.seconds:.5g} virtual seconds"
