"""The confidence of a ratio that must be known to a hundredth, on a machine with other load.

The pairs of `benchmarks.core.harness.interleave` alternate in order, so that two pairs are A B B A,
a *four*. In a four, a machine that slows down evenly adds as much time to A as to B. Each four
gives a ratio. The figure is the median of these ratios, with a bootstrap interval that contains 95%
of the medians of fours drawn with replacement.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.core.harness import Sample

DRAWS, SEED = 2000, 0
MIDDLE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The ratio of the time of jaxdist to the time of the reference.

    Attributes:
      median: the median of all fours.
      low, high: the interval that contains 95% of the medians of the bootstrap.
      fours: the number of fours.
    """

    median: float
    low: float
    high: float
    fours: int

    def against(self, limit: float) -> str:
        """Format the interval, and whether it leaves open on which side of a limit the ratio is.

        >>> Ratio(1.01, 1.0, 1.03, 9).against(1.02)
        '95% of 1.000 to 1.030, which does not tell it from 1.02; 9 times ABBA'
        """
        open_ = self.low <= limit < self.high
        doubt = f", which does not tell it from {limit:g}" if open_ else ""
        return f"{MIDDLE:.0%} of {self.low:.3f} to {self.high:.3f}{doubt}; {self.fours} times ABBA"


def ratio_of(ours: Sample, reference: Sample) -> Ratio:
    """Compare samples in which equal indices are a pair; an odd pair at the end does not count.

    Seconds that rise evenly cancel out:

    >>> ratio_of(Sample((2.0, 5.0)), Sample((3.0, 4.0)))
    Ratio(median=1.0, low=1.0, high=1.0, fours=1)
    """
    found = fours(ours, reference)
    draw = random.Random(SEED)
    medians = sorted(
        statistics.median(draw.choices(found, k=len(found))) for _ in range(DRAWS if found else 0)
    )
    if not medians:
        return Ratio(math.nan, math.nan, math.nan, 0)
    at = round((1 - MIDDLE) / 2 * (DRAWS - 1))
    return Ratio(statistics.median(found), medians[at], medians[-1 - at], len(found))


def fours(ours: Sample, reference: Sample) -> Sequence[float]:
    """Return the ratio of each four: two successive pairs."""
    a, b = ours.seconds, reference.seconds
    sums = [(a[i] + a[i + 1], b[i] + b[i + 1]) for i in range(0, len(a) - 1, 2)]
    return [x / y for x, y in sums if y]
