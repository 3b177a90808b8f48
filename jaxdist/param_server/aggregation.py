"""The paths of pushes from workers to servers: direct, through racks, or masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import LARGEST, Config
from jaxdist.errors import ConfigError, blamed
from jaxdist.secure.masks import check_installed
from jaxdist.secure.protocol import threshold


@dataclass(frozen=True)
class PushTraffic:
    """The numbers of bytes that servers and aggregators receive when every worker pushes once.

    Attributes:
      root: the bytes that all servers together receive; with equal shares, each of n servers
        receives 1/n of these bytes.
      aggregator: the bytes that the busiest aggregator receives, or 0 without aggregators.
    """

    root: int
    aggregator: int


class _Aggregation(Config):
    """The path of pushes without racks, which suits any number of workers."""

    def racks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the workers of each rack, or an empty tuple if pushes go to servers directly."""
        return ()

    def check(self, workers: int) -> None:
        """Refuse numbers of workers that do not suit the settings.

        Raises:
          ConfigError: the number of workers does not suit the settings.
        """


class Direct(_Aggregation):
    """Direct pushes of workers to servers: N workers send N times the parameters' bytes."""

    type: Literal["direct"] = "direct"
    """The name that selects direct pushes in a config."""

    def traffic(self, workers: int, size_bytes: int) -> PushTraffic:
        """Return the bytes that servers and aggregators receive when every worker pushes once.

        Args:
          workers: the number of workers.
          size_bytes: the size of one worker's push, in bytes.
        """
        return PushTraffic(workers * size_bytes, 0)


class Racks(_Aggregation):
    """Aggregation within racks: an aggregator sends the mean of its workers' pushes to the servers.

    The servers see each rack as one client. The workers of a rack always run in lockstep, and the
    consistency model of the servers applies to the racks. The number of bytes that the servers
    receive is divided by the size of a rack. Means are weighted by tokens. With bulk-synchronous
    rounds (bsp) the result equals the result of direct pushes, except for rounding: the changes are
    added in another order.
    """

    type: Literal["racks"] = "racks"
    """The name that selects aggregation by racks in a config."""
    size: Annotated[int, Field(ge=2, le=LARGEST)]
    """The number of workers in each rack. Racks are filled in the order of the workers' numbers,
    and the last rack may have fewer workers."""

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
                f"strategy.aggregation.size {self.size} puts all {workers} workers in a single "
                "rack, whose aggregator would have the load of all servers: set at most "
                f"{workers - 1}, or set type: direct",
                setting=("size",),
            )

    def traffic(self, workers: int, size_bytes: int) -> PushTraffic:
        """Return the bytes that servers and aggregators receive when every worker pushes once.

        Args:
          workers: the number of workers.
          size_bytes: the size of one worker's push, in bytes.

        >>> Racks(size=4).traffic(8, size_bytes=100)
        PushTraffic(root=200, aggregator=400)
        """
        racks = -(-workers // self.size)
        return PushTraffic(racks * size_bytes, min(workers, self.size) * size_bytes)


class Secure(_Aggregation):
    """Secure aggregation: servers learn the sum of a round's pushes, and no single push.

    Workers push fixed-point integers with masks that cancel in the sum (`jaxdist.secure`). A masked
    push has twice the bytes of a float32 push. The rounds work like the rounds of bsp, whose mean
    is weighted by tokens.
    """

    type: Literal["secure"] = "secure"
    """The name that selects secure aggregation in a config."""
    dropouts: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    """The number of workers that a round can lose. With null, the number is the largest number that
    leaves more than half of the workers, and at least two workers. If a round loses more workers,
    the run ends."""

    def needed(self, workers: int) -> int:
        """Return the number of workers that must complete a round.

        Raises:
          ConfigError: too few workers would be needed.

        >>> Secure().needed(5), Secure(dropouts=1).needed(5)
        (3, 4)
        """
        most = max(0, (workers - 1) // 2)
        return threshold(workers, most if self.dropouts is None else self.dropouts)

    def check(self, workers: int) -> None:
        """Refuse too few workers for the number of dropouts.

        Raises:
          ConfigError: too few workers would be needed to unmask a sum.
          SecureError: the package cryptography is not installed.
        """
        with blamed("dropouts"):
            self.needed(workers)
        check_installed()

    def traffic(self, workers: int, size_bytes: int) -> PushTraffic:
        """Return the bytes that servers and aggregators receive when every worker pushes once.

        The bytes for the exchange of keys are not counted.

        Args:
          workers: the number of workers.
          size_bytes: the size of a push without masks, in bytes. A masked push has twice this size.
        """
        return PushTraffic(2 * workers * size_bytes, 0)


AggregationConfig = Annotated[Direct | Racks | Secure, Field(discriminator="type")]
"""The path that pushes take to the servers, by type."""
