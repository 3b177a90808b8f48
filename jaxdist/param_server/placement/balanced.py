"""Bytes shared out evenly: largest range first onto the emptiest server."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from typing import Literal

from jaxdist.param_server.placement.contract import PlacementRule
from jaxdist.param_server.placement.ranges import Range


class Balanced(PlacementRule):
    """Bytes shared out evenly; when a server comes or goes, most ranges may move.

    The fullest server of n holds at most 4/3 - 1/(3 n) of what the best placement's would (Graham,
    "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969, theorem 2), and at
    most the mean and (1 - 1/n) of the largest range: 1/n of all bytes where ranges are small.
    """

    type: Literal["balanced"] = "balanced"
    """Selects this placement."""

    def owners(self, ranges: Sequence[Range], servers: tuple[int, ...]) -> tuple[int, ...]:
        loads = [(0, server) for server in servers]
        heapify(loads)
        found = [servers[0]] * len(ranges)
        for at in sorted(range(len(ranges)), key=lambda at: (-ranges[at].size_bytes, at)):
            taken, found[at] = loads[0]
            heapreplace(loads, (taken + ranges[at].size_bytes, found[at]))
        return tuple(found)

    def law(self, servers: int) -> str:
        ratio = Fraction(4, 3) - Fraction(1, 3 * servers)
        return (
            f"largest range first onto the emptiest server: at most {ratio} of the best placement"
        )
