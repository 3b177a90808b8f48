"""Consistent hashing: a server that joins or leaves moves only its own share of the bytes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import Field

from jaxdist.param_server.placement.contract import PlacementRule
from jaxdist.param_server.placement.ranges import Range


class Hashed(PlacementRule):
    """A rule that assigns every range to the next server on a circle with many points per server.

    Karger et al., "Consistent hashing and random trees" (STOC 1997), section 4. With V points for
    each of n servers, shares differ by about 1/sqrt(V) of their mean. A server that joins n other
    servers takes 1/(n + 1) of the bytes on average, from all n servers, and nothing moves between
    these n servers. A server that leaves gives its share to all remaining servers.
    """

    type: Literal["hashed"] = "hashed"
    """The name that selects this placement in a config."""
    virtual_nodes: Annotated[int, Field(ge=1, le=2**16)] = 128
    """The number of points of each server on the circle. More points balance the bytes better."""
    seed: Annotated[int, Field(ge=0, le=2**63)] = 0
    """The seed of the hash, which determines the points of servers and ranges."""

    def owners(self, ranges: Sequence[Range], servers: tuple[int, ...]) -> tuple[int, ...]:
        circle = sorted(
            (self._at(f"server {server} {node}"), server)
            for server in servers
            for node in range(self.virtual_nodes)
        )
        places = [place for place, _ in circle]
        after = (bisect(places, self._at(f"range {found.key}")) for found in ranges)
        return tuple(circle[at % len(circle)][1] for at in after)

    def _at(self, key: str) -> int:
        # Python's own hash of a string is not used, because it differs from process to process.
        salt = self.seed.to_bytes(8, "little")
        return int.from_bytes(blake2b(key.encode(), digest_size=8, salt=salt).digest(), "little")

    def law(self, servers: int) -> str:
        return (
            f"consistent hashing, {self.virtual_nodes} virtual nodes for each server: an "
            f"additional server receives about 1/{servers + 1} of the bytes, and no other bytes "
            "move"
        )
