"""A placement that balances bytes: the largest range is assigned first, to the emptiest server."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from typing import Literal

from jaxdist.param_server.placement.contract import PlacementRule
from jaxdist.param_server.placement.ranges import Range


class Balanced(PlacementRule):
    """A rule that balances bytes; most ranges may move if a server joins or leaves.

    The fullest of n servers holds at most 4/3 - 1/(3 n) times the bytes of the best placement
    (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969, theorem 2).
    That server also holds at most the mean plus (1 - 1/n) of the largest range. If ranges are
    small, this bound is close to 1/n of all bytes.
    """

    type: Literal["balanced"] = "balanced"
    """The name that selects this placement in a config."""

    def owners(self, ranges: Sequence[Range], servers: tuple[int, ...]) -> tuple[int, ...]:
        loads = [(0, server) for server in servers]
        heapify(loads)
        found = [servers[0]] * len(ranges)
        # Ties are broken by position. Each process computes the placement for itself, and all
        # processes must get the same placement.
        for at in sorted(range(len(ranges)), key=lambda at: (-ranges[at].size_bytes, at)):
            taken, found[at] = loads[0]
            heapreplace(loads, (taken + ranges[at].size_bytes, found[at]))
        return tuple(found)

    def law(self, servers: int) -> str:
        ratio = Fraction(4, 3) - Fraction(1, 3 * servers)
        return (
            f"largest range first, to the emptiest server: at most {ratio} of the best "
            "placement's bytes"
        )
