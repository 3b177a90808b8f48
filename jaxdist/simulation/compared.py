"""The comparison of simulated runs of variants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxdist.columns import aligned
from jaxdist.simulation.engine.report import Report
from jaxdist.study.variants import Variant
from jaxdist.types import JsonObject

TOLERANCE = 0.01
"""The fraction by which the default target exceeds the first variant's last loss."""


Targets = tuple[float, ...]
"""The target loss of each seed; the time until a run reaches its target is measured."""


@dataclass(frozen=True)
class SimulatedVariant:
    """The simulated runs of a variant.

    Attributes:
      reports: the reports of the runs, in the order of the seeds.
    """

    variant: Variant
    seeds: tuple[int, ...]
    reports: tuple[Report, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The last loss of each run."""
        return tuple(report.loss for report in self.reports)

    def seconds_to(self, targets: Targets) -> float | None:
        """Return the mean virtual seconds to the target, or None if a run does not reach it."""
        pairs = zip(self.reports, targets, strict=True)
        found = [report.seconds_to(target) for report, target in pairs]
        reached = [seconds for seconds in found if seconds is not None]
        return statistics.fmean(reached) if len(reached) == len(found) else None

    def as_json(self, targets: Targets) -> JsonObject:
        """Return the comparison as plain data: settings, means and all runs."""
        return {
            "name": self.variant.name,
            "overrides": list(self.variant.overrides),
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],
            "seconds_to_target": self.seconds_to(targets),
            "runs": [
                {"seed": seed, **report.as_json()}
                for seed, report in zip(self.seeds, self.reports, strict=True)
            ],
        }


def default_targets(first: SimulatedVariant) -> Targets:
    """Return, for each seed, a loss that is 1% above the first variant's last loss."""
    return tuple(loss * (1 + TOLERANCE) for loss in first.losses)


def variants_table(rows: Sequence[SimulatedVariant], targets: Targets) -> str:
    """Format the variants as lines of at most 80 columns."""
    return "\n".join(_lines(rows, targets))


def _lines(rows: Sequence[SimulatedVariant], targets: Targets) -> Iterator[str]:
    first = rows[0]
    base, base_loss = first.seconds_to(targets), statistics.fmean(first.losses)
    cells = []
    for row in rows:
        reports = row.reports
        loss, seconds = statistics.fmean(row.losses), row.seconds_to(targets)
        spread = statistics.stdev(row.losses) if len(row.losses) > 1 else 0.0
        change = f"{loss / base_loss - 1:+.1%}" if row is not first and base_loss else ""
        speed = f"{base / seconds:.2f}x" if base and seconds else ""
        stale = statistics.fmean(report.mean_staleness for report in reports)
        most = max(max(report.staleness, default=0) for report in reports)
        idle = statistics.fmean(report.idle_share for report in reports)
        cells.append(
            [
                *(row.variant.name, f"{loss:.4f}", f"{spread:.4f}", change),
                *(_seconds(seconds), speed, f"{stale:.1f}/{most}", f"{idle:.0%}"),
            ]
        )
    header = ["", "loss", "spread", "change", "to target", "speed", "stale", "idle"]
    yield from aligned(header, cells, left=[0])
    yield ""
    yield from _traffic(rows)


def _traffic(rows: Sequence[SimulatedVariant]) -> list[str]:
    """Return the lines about traffic; bytes depend on the seed only through lost messages."""
    cells = []
    for row in rows:
        reports = row.reports
        seconds = statistics.fmean(report.seconds for report in reports)
        into = statistics.fmean(max(report.received_bytes) for report in reports) / 1e6
        out = statistics.fmean(max(report.sent_bytes) for report in reports) / 1e6
        cells.append([row.variant.name, f"{seconds:.4g}", f"{into:.4g}", f"{out:.4g}"])
    header = ["", "virtual s", "MB into the fullest server", "MB out"]
    return aligned(header, cells, left=[0])


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.4g} s"
