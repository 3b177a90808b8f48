"""The results of a comparison of variants, as rows of a table and as JSON values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.columns import Columns, cells, markdown
from jaxdist.study.trial import (
    TrialOutcome,
    VariantTrial,
    deviation,
    finite,
    metrics_of,
    with_spread,
)
from jaxdist.study.variants import Variant
from jaxdist.types import JsonObject

MARGIN = 0.01
"""A variant counts as equal to the baseline if its held-out loss changes by at most this fraction
of the baseline's loss, up or down, in the mean over the seeds."""


@dataclass(frozen=True)
class VariantResult:
    """The runs of a variant, and the runs of the baseline with which they are compared.

    Attributes:
      variant: the variant that is compared with the baseline.
      sent_bytes: the bytes that a device sends in a step over the mesh axes that share the batch.
      base_bytes: the bytes that a device sends in a step with the baseline.
      outcomes, base: the runs of this variant and of the baseline. Variant and baseline have a run
        for each seed, in the order of the seeds.
    """

    variant: Variant
    sent_bytes: float
    base_bytes: float
    outcomes: tuple[TrialOutcome[VariantTrial], ...]
    base: tuple[TrialOutcome[VariantTrial], ...]

    @property
    def diverged(self) -> int:
        """The number of the variant's runs that diverged."""
        return sum(outcome.diverged for outcome in self.outcomes)

    @property
    def losses(self) -> list[float]:
        """The held-out loss of each seed's run; all losses are NaN if any run diverged."""
        return metrics_of(self.outcomes, "loss")

    @property
    def changes(self) -> list[float]:
        """The relative change of each seed's loss from the baseline; 0.01 means 1% more.

        All changes are NaN if any run of the variant or the baseline diverged, or if a loss of the
        baseline is 0.
        """
        pairs = zip(self.outcomes, self.base, strict=True)
        if self.diverged or any(o.diverged or not o.metrics["loss"] for o in self.base):
            return [math.nan] * len(self.outcomes)
        return [one.metrics["loss"] / other.metrics["loss"] - 1 for one, other in pairs]

    @property
    def relative_bytes(self) -> float | None:
        """The sent bytes as a fraction of the baseline's bytes, or None if these are 0."""
        return self.sent_bytes / self.base_bytes if self.base_bytes else None

    @property
    def verdict(self) -> str:
        """The verdict on the variant in a few words, which is empty for the baseline.

        A "?" means that the verdict is not the same for all seeds.
        """
        if self.diverged:
            return f"diverged {self.diverged}/{len(self.outcomes)}"
        if self.outcomes == self.base:
            return ""
        changes = self.changes
        if math.isnan(changes[0]):
            return "no baseline"
        found = _judged(statistics.fmean(changes))
        return found + ("" if all(_judged(change) == found for change in changes) else " ?")

    def as_json(self) -> JsonObject:
        """Return the results as JSON values, in which None replaces numbers that are not finite."""
        return {
            "name": self.variant.name,
            "overrides": list(self.variant.overrides),
            "loss": finite(statistics.fmean(self.losses)),
            "spread": finite(deviation(self.losses)),
            "change": finite(statistics.fmean(self.changes)),
            "change_spread": finite(deviation(self.changes)),
            "sent_bytes": self.sent_bytes,
            "relative_bytes": self.relative_bytes,
            "diverged": self.diverged,
            "verdict": self.verdict,
        }


def _judged(change: float) -> str:
    if abs(change) <= MARGIN:
        return "within 1%"
    return "worse" if change > 0 else "better"


def comparison_table(rows: Sequence[VariantResult]) -> str:
    """Return a table with a row for each variant, at most 80 characters wide."""
    return "\n".join(markdown(COLUMNS, cells(COLUMNS, rows), padded=True))


def loss_shown(row: VariantResult) -> str:
    """Return the mean and spread of the held-out loss as text, or "-" if a run diverged."""
    if row.diverged:
        return "-"
    mean = statistics.fmean(row.losses)
    places = 3 if mean >= 1 else 4
    return with_spread(f"{mean:.{places}f}", deviation(row.losses), places)


def _change_shown(row: VariantResult) -> str:
    if row.outcomes == row.base or math.isnan(row.changes[0]):
        return ""
    percent = [100 * change for change in row.changes]
    return with_spread(f"{statistics.fmean(percent):+.1f}", deviation(percent), 1)


COLUMNS: Columns[VariantResult] = {
    "variant": "variant.name",
    "held-out loss": loss_shown,
    "change, %": _change_shown,
    "bytes": lambda row: "-" if row.relative_bytes is None else f"{row.relative_bytes:.3f}",
    "verdict": "verdict",
}
