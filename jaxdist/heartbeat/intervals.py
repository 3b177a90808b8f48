"""Closed forms of the best interval between saves, for random failures at a constant rate.

All times are in seconds. `work` is the time between two saves, and `cost` is the time that a save
takes. `mttf` is the mean time between two failures of the whole fleet. `recovery` is the time from
a failure until work continues from the last save.
"""

from __future__ import annotations

import math

DAY_SECONDS = 86_400.0


def mttf_of(parts: float, failures_per_day: float) -> float:
    """Return the mean seconds between failures of a fleet of `parts` parts, such as nodes.

    The example has 2048 nodes with the rate that Meta fitted for jobs of more than 32 GPUs (arXiv
    2410.21680, section IV):

    >>> round(mttf_of(2048, 6.5e-3))
    6490

    Args:
      failures_per_day: the number of failures of each part in a day.
    """
    return DAY_SECONDS / (parts * failures_per_day)


def young(cost: float, mttf: float) -> float:
    """Return the time between saves that loses the least time, to first order: sqrt(2 cost mttf).

    The formula is from Young, "A first order approximation to the optimum checkpoint interval"
    (CACM 17, 1974).

    >>> round(young(60, mttf_of(2048, 6.5e-3)))
    883
    """
    return math.sqrt(2 * cost * mttf)


def daly(cost: float, mttf: float) -> float:
    """Return the time between saves that loses the least time, to a higher order than `young`.

    The formula also counts failures during saves, and work that is partly lost. The formula is
    equation 37 of Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps" (FGCS 22, 2006). If `cost` is at least 2 `mttf`, the result is `mttf`.

    >>> round(daly(60, mttf_of(2048, 6.5e-3)))
    843
    """
    if cost >= 2 * mttf:
        return mttf
    share = math.sqrt(cost / (2 * mttf))
    return young(cost, mttf) * (1 + share / 3 + share**2 / 9) - cost


def expected(work: float, cost: float, mttf: float, recovery: float) -> float:
    """Return the expected seconds until `work` is done and saved, with all failures and recoveries.

    The formula is mttf e^(recovery / mttf) (e^((work + cost) / mttf) - 1), from Daly 2006, section
    3. The result is infinite if it exceeds the range of a float.

    >>> expected(100, 0, 1e9, 0)
    100.00000...
    """
    if max(recovery, work + cost) > 300 * mttf:
        return math.inf  # The work would practically never be done, and `exp` would overflow.
    return mttf * math.exp(recovery / mttf) * math.expm1((work + cost) / mttf)


def goodput(work: float, cost: float, mttf: float, recovery: float) -> float:
    """Return the share of time that is spent on kept work, if failures are random.

    Kept work is the work that is not lost in a failure. A run is saved after each `work` seconds of
    work.

    Args:
      work: the seconds of work between two saves.
      cost: the seconds that a save takes.
      mttf: the mean seconds between two failures.
      recovery: the seconds that a recovery takes.

    >>> round(goodput(883, 60, mttf_of(2048, 6.5e-3), 600), 3)
    0.793
    """
    return work / expected(work, cost, mttf, recovery)


def planned_share(work: float, cost: float, between: float, recovery: float) -> float:
    """Return the share of time that is spent on kept work, if failures come at regular intervals.

    Kept work is the work that is not lost in a failure.

    The formula assumes that no failure occurs during a recovery, and that each failure loses half
    of the work between two saves.

    Args:
      work: the seconds of work between two saves.
      cost: the seconds that a save takes.
      between: the seconds of work between two failures.
      recovery: the seconds that a recovery takes.

    >>> planned_share(10, 0.1, 60, 5)
    0.84...
    """
    return 1 / (1 + cost / work + (recovery + work / 2) / between)
