"""Who combines gradients on their way: nobody, or an aggregator in each rack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import LARGEST, Config
from jaxdist.errors import ConfigError


@dataclass(frozen=True)
class Traffic:
    """Bytes that come in for one push of all workers.

    Attributes:
      root: at the servers, all together: an n-th at each of n that share parameters evenly.
      aggregator: at the fullest aggregator; 0 where there is none.
    """

    root: int
    aggregator: int


class Direct(Config):
    """Every worker pushes to the servers itself: N workers send N times the parameters' bytes."""

    type: Literal["direct"] = "direct"
    """Selects this way."""

    def racks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """No racks."""
        return ()

    def check(self, workers: int) -> None:
        """Accept any number of workers."""

    def traffic(self, workers: int, size_bytes: int) -> Traffic:
        """What comes in for one push of all workers.

        Args:
          size_bytes: of one worker's push.
        """
        return Traffic(workers * size_bytes, 0)


class Racks(Config):
    """Workers of a rack push to its aggregator, which sends the mean of a round to the servers.

    A rack is one client of the servers: its workers keep step with each other, whatever the model
    says of racks, and the servers receive by the rack's size less. Means are weighted by tokens, so
    that in rounds (bsp) the result is that of workers who push themselves, but for rounding: sums
    are taken in another order.
    """

    type: Literal["racks"] = "racks"
    """Selects this way."""
    size: Annotated[int, Field(ge=2, le=LARGEST)]
    """Workers of a rack, in the order of their numbers; the last rack has the rest."""

    def racks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The workers of each rack.

        >>> Racks(size=2).racks(range(5))
        ((0, 1), (2, 3), (4,))
        """
        starts = range(0, len(workers), self.size)
        return tuple(tuple(workers[start : start + self.size]) for start in starts)

    def check(self, workers: int) -> None:
        """Refuse a rack of all workers.

        Raises:
          ConfigError: `size` is not below the number of workers.
        """
        if self.size >= workers:
            raise ConfigError(
                f"strategy.aggregation.size {self.size} puts all {workers} workers in one rack, "
                f"whose aggregator takes what the servers would: at most {workers - 1}, or type "
                "direct",
                setting=("size",),
            )

    def traffic(self, workers: int, size_bytes: int) -> Traffic:
        """What comes in for one push of all workers.

        >>> Racks(size=4).traffic(8, size_bytes=100)
        Traffic(root=200, aggregator=400)
        """
        racks = -(-workers // self.size)
        return Traffic(racks * size_bytes, min(workers, self.size) * size_bytes)


AggregationConfig = Annotated[Direct | Racks, Field(discriminator="type")]
"""How pushes come to the servers."""
