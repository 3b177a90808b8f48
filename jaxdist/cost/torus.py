"""How long a collective takes on the torus of a TPU slice, from its bytes and the links it uses.

Chips are joined to their neighbours along two or three dims. A collective over a box of chips uses
the links of each dim in which the box is longer than one, all at once: both directions where the
dim is a ring, one where it is a line (on a line, all that an end receives comes through one link).
An all-gather of V bytes then takes V (n-1)/n over the sum of these links, a reduce-scatter as
long, an all-reduce twice that, an all-to-all a quarter of the all-gather (Austin et al., "How to
Scale Your Model", chapter "Sharded matrices"). To that come the hops that the first byte travels.

What is not a box (a group whose chips lie scattered) is taken at one link of one dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.hlo.records import Collective
from jaxdist.runtime.hardware import Link
from jaxdist.runtime.topology import FAMILIES, rings

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A collective on the links: its seconds, and the dims of the torus that it keeps busy."""

    seconds: float
    dims: frozenset[int]


@dataclass(frozen=True)
class Torus:
    """Chips of one slice, or of several that a slower network joins.

    Attributes:
      places: for each position in the program's device assignment, the chip's coordinates, the
        slice in front.
      rings: for each dim of the torus, whether its ends are joined; may go on after the last.
      fast: between neighbours.
      slow: between slices.
    """

    places: np.ndarray
    rings: tuple[bool, ...]
    fast: Link
    slow: Link

    def transfer(self, collective: Collective) -> Transfer:
        """One execution of a collective, with nothing else on its links."""
        if not collective.sent_bytes:
            return Transfer(0.0, frozenset())
        if collective.kind == "collective-permute":
            return self._permute(collective)
        extents = self._extents(collective.groups)
        dims = frozenset(dim for dim, extent in enumerate(extents) if extent > 1)
        if 0 in dims:
            latency = self.slow.latency_seconds * math.log2(max(collective.group_size, 2))
            return Transfer(latency + collective.sent_bytes / self.slow.bytes_per_second, dims)
        is_box = math.prod(extents) == collective.group_size
        ports = sum(self._ports(dim, extents[dim]) for dim in dims) if is_box else 1
        hops = sum(self._hops(dim, extents[dim]) for dim in dims)
        rounds = 2 if collective.kind == "all-reduce" else 1
        share = 0.25 if collective.kind == "all-to-all" else 1.0
        wire = share * collective.sent_bytes / (ports * self.fast.bytes_per_second)
        return Transfer(rounds * hops * self.fast.latency_seconds + wire, dims)

    def _permute(self, collective: Collective) -> Transfer:
        """A message between two chips; those that travel several hops share the links between."""
        ends = self.places[np.array(collective.groups)]
        apart = np.abs(ends[:, 0] - ends[:, 1])
        if apart[:, 0].any():
            seconds = self.slow.latency_seconds
            return Transfer(
                seconds + collective.sent_bytes / self.slow.bytes_per_second, frozenset({0})
            )
        for dim in range(1, apart.shape[1]):
            if self.rings[dim - 1]:
                size = self.places[:, dim].max() + 1
                apart[:, dim] = np.minimum(apart[:, dim], size - apart[:, dim])
        hops = int(apart.sum(axis=1).max())
        dims = frozenset(int(dim) for dim in np.flatnonzero(apart.any(axis=0)))
        wire = hops * collective.sent_bytes / self.fast.bytes_per_second
        return Transfer(hops * self.fast.latency_seconds + wire, dims)

    def _extents(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """How many different coordinates a group has in each dim, at most over the groups."""
        if len({len(group) for group in groups}) > 1:
            return [max(sizes) for sizes in zip(*(self._extents([g]) for g in groups), strict=True)]
        places = np.sort(self.places[np.array(groups)], axis=1)  # [group, member, dim]
        return [int(n) for n in 1 + (np.diff(places, axis=1) != 0).sum(axis=1).max(axis=0)]

    def _ports(self, dim: int, extent: int) -> int:
        size = int(self.places[:, dim].max()) + 1
        return 2 if self.rings[dim - 1] and extent == size and size > 2 else 1

    def _hops(self, dim: int, extent: int) -> int:
        return extent // 2 if self._ports(dim, extent) == 2 else extent - 1


def torus_of(devices: Sequence[Any], family: str, fast: Link, slow: Link) -> Torus:
    """The torus that TPU devices lie on.

    Args:
      devices: in the order of the program's device assignment, with jax's `coords`.
      family: "v5e", "v5p", ...: which lengths close to a ring.
      fast, slow: between neighbours, and between slices.
    """
    places = np.array([(getattr(d, "slice_index", 0) or 0, *d.coords) for d in devices])
    sizes = tuple(int(size) for size in places.max(axis=0)[1:] + 1)
    # A dim that a family of two does not have has length 1, and no ring.
    return Torus(places, rings(family, sizes[: FAMILIES[family].dims]) + (False,) * 3, fast, slow)
