"""The contract of placement rules, and the placement that they return."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from jaxdist.columns import aligned
from jaxdist.config.schema import LARGEST, Config
from jaxdist.errors import ConfigError, some_of
from jaxdist.param_server.placement.ranges import PlaceableTensor, Range, cut_ranges

RANGE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Placement:
    """An assignment of ranges of parameters to servers.

    Attributes:
      servers: the servers' numbers, ascending.
      ranges: the ranges of all parameters, in the parameters' order.
      owners: for each range, the server that holds it.
      law: the placement rule's guarantee about bytes, as a sentence.
    """

    servers: tuple[int, ...]
    ranges: tuple[Range, ...]
    owners: tuple[int, ...]
    law: str

    def held(self, server: int) -> tuple[Range, ...]:
        """Return the shard of a server: its ranges, in the parameters' order."""
        pairs = zip(self.ranges, self.owners, strict=True)
        return tuple(found for found, owner in pairs if owner == server)

    @property
    def bytes_by_server(self) -> dict[int, int]:
        """The number of bytes of each server's shard.

        If N workers push all parameters, a server receives N times this number.
        """
        return {server: sum(r.size_bytes for r in self.held(server)) for server in self.servers}

    @property
    def bound_bytes(self) -> int:
        """A lower bound on the fullest server's bytes, for any placement of these ranges."""
        return least_bytes([found.size_bytes for found in self.ranges], len(self.servers))

    def explain(self) -> str:
        """Return the placement as a table, and its quality in words.

        >>> from jaxdist.param_server.placement.balanced import Balanced
        >>> tensors = [PlaceableTensor("head", 1, 500_000), PlaceableTensor("embed", 8, 1_200_000)]
        >>> print(Balanced(range_bytes=400_000).place(tensors, servers=[0, 1]).explain())
        server  ranges   MB  share
             0       2  0.8  47.1%
             1       2  0.9  52.9%
        fullest server: 1, 0.9 MB; mean 0.85 MB; lower bound for these ranges 0.9 MB
        cut by rows: embed (3)
        largest range first, to the emptiest server: at most 7/6 of the best placement's bytes
        """
        return "\n".join([*self._table(), *self._reasons()])

    def _table(self) -> list[str]:
        total = sum(found.size_bytes for found in self.ranges)
        rows = [
            [str(server), str(len(self.held(server))), f"{size / 1e6:.4g}", f"{size / total:.1%}"]
            for server, size in self.bytes_by_server.items()
        ]
        return aligned(["server", "ranges", "MB", "share"], rows)

    def _reasons(self) -> list[str]:
        sizes = self.bytes_by_server
        fullest = max(sizes, key=lambda server: sizes[server])
        mean = sum(sizes.values()) / len(sizes)
        lines = [
            f"fullest server: {fullest}, {sizes[fullest] / 1e6:.4g} MB; mean {mean / 1e6:.4g} MB; "
            f"lower bound for these ranges {self.bound_bytes / 1e6:.4g} MB"
        ]
        parts = Counter(found.name for found in self.ranges)
        cuts = [f"{name} ({count})" for name, count in parts.items() if count > 1]
        if cuts:
            lines.append(f"cut by rows: {some_of(cuts, 4)}")
        return [*lines, self.law]


class PlacementRule(Config):
    """A rule that assigns ranges to servers."""

    range_bytes: Annotated[int, Field(ge=1, le=LARGEST)] | None = RANGE_BYTES
    """The largest size of a range, in bytes. Larger tensors are cut by rows; null cuts no
    tensor."""

    def place(self, tensors: Sequence[PlaceableTensor], servers: Sequence[int]) -> Placement:
        """Assign every range of these tensors to a server.

        Args:
          servers: the servers' numbers, which stay the same when other servers join or leave.

        Raises:
          ConfigError: `servers` is empty, names a server twice, or has more servers than there are
            ranges; or `cut_ranges` raises the error.
        """
        ranges, numbers = cut_ranges(tensors, self.range_bytes), tuple(sorted(servers))
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"placement: servers {list(servers)}: name at least one server, none twice"
            )
        if len(ranges) < len(numbers):
            raise ConfigError(
                f"placement: {len(numbers)} servers, but {len(tensors)} parameters make only "
                f"{len(ranges)} ranges (range_bytes {self.range_bytes}): use at most "
                f"{len(ranges)} servers, or a smaller range_bytes"
            )
        owners = self.owners(ranges, numbers)
        return Placement(numbers, ranges, owners, self.law(len(numbers)))

    @abstractmethod
    def owners(self, ranges: Sequence[Range], servers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the server of each range.

        Raises:
          ConfigError: the rule does not support this number of servers.
        """

    @abstractmethod
    def law(self, servers: int) -> str:
        """Return what this rule guarantees about each server's bytes, as a sentence."""


def least_bytes(sizes: Sequence[int], servers: int) -> int:
    """Return a lower bound on the bytes of the fullest of `servers` servers, for any placement.

    >>> least_bytes([3, 3, 3], 2)
    6
    """
    ordered = sorted(sizes, reverse=True)
    mean = -(-sum(ordered) // servers)
    # Of the n + 1 largest ranges, at least two share a server. Together they have at least the
    # bytes of the two smallest of these n + 1 ranges.
    pair = sum(ordered[servers - 1 : servers + 1]) if len(ordered) > servers else 0
    return max(mean, ordered[0], pair)
