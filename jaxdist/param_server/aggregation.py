"""Ways to combine gradients between workers and servers: none, or an aggregator in each rack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import LARGEST, Config
from jaxdist.errors import ConfigError


@dataclass(frozen=True)
class PushTraffic:
    """Numbers of bytes that are received when every worker pushes once.

    Attributes:
      root: bytes received by all servers together; each of n servers with equal shares gets 1/n.
      aggregator: bytes received by the busiest aggregator, or 0 without aggregators.
    """

    root: int
    aggregator: int


class Direct(Config):
    """Every worker pushes to the servers directly: N workers send N times the parameters' bytes."""

    type: Literal["direct"] = "direct"
    """Select direct pushes."""

    def racks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return an empty tuple, because direct pushes use no racks."""
        return ()

    def check(self, workers: int) -> None:
        """Accept any number of workers."""

    def traffic(self, workers: int, size_bytes: int) -> PushTraffic:
        """Return the bytes that are received when every worker pushes once.

        Args:
          size_bytes: size of one worker's push.
        """
        return PushTraffic(workers * size_bytes, 0)


class Racks(Config):
    """Workers of a rack push to its aggregator, which sends the mean of a round to the servers.

    The servers see each rack as one client. Within a rack, workers always run in lockstep, whatever
    the consistency model; the model governs the racks. The servers receive fewer bytes, by a factor
    of the rack's size. Means are weighted by tokens. With bulk-synchronous rounds (bsp) the result
    equals that of direct pushes except for rounding, because the sums have another order.
    """

    type: Literal["racks"] = "racks"
    """Select aggregation by racks."""
    size: Annotated[int, Field(ge=2, le=LARGEST)]
    """Workers per rack, in the order of their numbers; the last rack may have fewer."""

    def racks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the workers of each rack.

        >>> Racks(size=2).racks(range(5))
        ((0, 1), (2, 3), (4,))
        """
        starts = range(0, len(workers), self.size)
        return tuple(tuple(workers[start : start + self.size]) for start in starts)

    def check(self, workers: int) -> None:
        """Refuse a rack that holds all workers.

        Raises:
          ConfigError: `size` is not below the number of workers.
        """
        if self.size >= workers:
            raise ConfigError(
                f"strategy.aggregation.size {self.size} puts all {workers} workers in one rack, "
                "whose aggregator would carry the load of the servers: give at most "
                f"{workers - 1}, or set type direct",
                setting=("size",),
            )

    def traffic(self, workers: int, size_bytes: int) -> PushTraffic:
        """Return the bytes that are received when every worker pushes once.

        >>> Racks(size=4).traffic(8, size_bytes=100)
        PushTraffic(root=200, aggregator=400)
        """
        racks = -(-workers // self.size)
        return PushTraffic(racks * size_bytes, min(workers, self.size) * size_bytes)


AggregationConfig = Annotated[Direct | Racks, Field(discriminator="type")]
"""The path that pushes take to the servers, by type."""
