"""The time of a collective on the torus of a TPU slice, from its bytes and its links.

Chips are joined to their neighbors along two or three dims. A collective over a box of chips uses,
at the same time, the links of each dim in which the box is longer than 1. If the box covers a whole
ring of a dim, the links of both directions are used. Otherwise the box is a line in this dim, and
only the links of one direction are used, because the end of a line receives all data through one
link. An all-gather of V bytes among n devices then takes the time of V (n-1)/n bytes at the rate of
all used links together. A reduce-scatter takes as long as an all-gather, an all-reduce twice as
long, and an all-to-all a quarter as long (Austin et al., "How to Scale Your Model", chapter
"Sharded matrices"). The latency of each hop to the farthest chip is added, for an all-reduce twice.

A group that is not a box (scattered chips) is assumed to use a single link of a single dim. A
collective over several slices takes the time of its bytes on the network between slices.

The two devices of a chip form an additional dim, without links of the torus. A collective that
includes this dim sends each byte into the chip once. In a collective along other dims, both devices
of a chip send at the same time, and share the links.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxdist.hlo.records import Collective
from jaxdist.runtime.hardware import CHIPLET_LINKS, Link
from jaxdist.runtime.topology import FAMILIES, rings


class Transfer(NamedTuple):
    """A collective's time and links.

    Attributes:
      seconds: the time if no other collective uses the links.
      links: the numbers of the links that are used: d and -d are the two directions along dim d of
        the torus, counted from 1; 0 is the network between slices.
    """

    seconds: float
    links: frozenset[int]


@dataclass(frozen=True)
class Torus:
    """The chips of a slice, or of several slices joined by a slower network.

    Attributes:
      places: for each position in the program's device assignment, the number of the slice,
        followed by the coordinates of the chip.
      rings: for each dim of the torus, whether its ends are joined; elements for more dims than the
        torus has are ignored.
      fast: the link between neighbors.
      slow: the link between slices.
      cores: the number of devices of a chip. If a chip has several devices, the last coordinate in
        `places` is the number of the device within the chip.
    """

    places: np.ndarray
    rings: tuple[bool, ...]
    fast: Link
    slow: Link
    cores: int = 1

    def transfer(self, collective: Collective) -> Transfer:
        """Return a collective's links, and its time if no other collective uses these links."""
        if not collective.sent_bytes:
            return Transfer(0.0, frozenset())
        if collective.kind == "collective-permute":
            return self._permute(collective)
        extents = self._extents(collective.groups)
        dims = frozenset(dim for dim, extent in enumerate(extents) if extent > 1)
        if 0 in dims:
            latency = self.slow.latency_seconds * math.log2(max(collective.group_size, 2))
            return Transfer(
                latency + collective.sent_bytes / self.slow.bytes_per_second, both_ways(dims)
            )
        is_box = math.prod(extents) == collective.group_size
        far = dims - self._inside
        ports = sum(self._ports(dim, extents[dim]) for dim in far) if is_box and far else 1
        hops = sum(self._hops(dim, extents[dim]) for dim in far)
        rounds = 2 if collective.kind == "all-reduce" else 1
        share = 0.25 if collective.kind == "all-to-all" else 1.0
        wire = share * collective.sent_bytes / (ports * self._link_rate(dims))
        return Transfer(rounds * hops * self.fast.latency_seconds + wire, both_ways(dims))

    def _permute(self, collective: Collective) -> Transfer:
        """Return the time and links of a permute, in which messages of several hops share links."""
        ends = self.places[np.array(collective.groups)]
        way = ends[:, 1] - ends[:, 0]
        if way[:, 0].any():
            seconds = self.slow.latency_seconds
            return Transfer(
                seconds + collective.sent_bytes / self.slow.bytes_per_second, frozenset({0})
            )
        for dim in range(1, way.shape[1]):
            if self.rings[dim - 1]:
                size = self.places[:, dim].max() + 1
                # Around a ring a message takes the shorter direction, at most half of the ring.
                way[:, dim] = (way[:, dim] + (size - 1) // 2) % size - (size - 1) // 2
        hops = int(np.abs(way).sum(axis=1).max())
        links = {sign * dim for sign in (1, -1) for dim in np.flatnonzero((sign * way > 0).any(0))}
        dims = frozenset(map(abs, map(int, links)))
        wire = hops * collective.sent_bytes / self._link_rate(dims)
        return Transfer(hops * self.fast.latency_seconds + wire, frozenset(map(int, links)))

    @property
    def _inside(self) -> frozenset[int]:
        """A set with the dim that counts a chip's devices, or an empty set without such a dim."""
        return frozenset({self.places.shape[1] - 1} if self.cores > 1 else ())

    def _link_rate(self, dims: frozenset[int]) -> float:
        """Return the bytes per second of a device on a link, in a collective along `dims`."""
        if dims and dims <= self._inside:
            return CHIPLET_LINKS * self.fast.bytes_per_second
        return self.fast.bytes_per_second / (1 if dims & self._inside else self.cores)

    def _extents(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Return, for each dim, the largest number of different coordinates in a group."""
        if len({len(group) for group in groups}) > 1:
            return [max(sizes) for sizes in zip(*(self._extents([g]) for g in groups), strict=True)]
        # The array [group, member, dim] is sorted along members. The number of changes between
        # successive members is then the number of different coordinates minus one.
        places = np.sort(self.places[np.array(groups)], axis=1)
        return [int(n) for n in 1 + (np.diff(places, axis=1) != 0).sum(axis=1).max(axis=0)]

    def _ports(self, dim: int, extent: int) -> int:
        size = int(self.places[:, dim].max()) + 1
        # A chip on a ring of two chips has only one neighbor, as on a line.
        return 2 if self.rings[dim - 1] and extent == size and size > 2 else 1

    def _hops(self, dim: int, extent: int) -> int:
        return extent // 2 if self._ports(dim, extent) == 2 else extent - 1


def both_ways(dims: Iterable[int]) -> frozenset[int]:
    """Return the numbers of the links in both directions along dims.

    >>> sorted(both_ways({1, 3}))
    [-3, -1, 1, 3]
    """
    return frozenset(sign * dim for dim in dims for sign in (1, -1))


def torus_of(devices: Sequence[Any], family: str, fast: Link, slow: Link) -> Torus:
    """Return the torus that TPU devices form.

    Args:
      devices: the TPU devices of jax, in the order of the program's device assignment.
      family: the family, such as "v5e", which determines the lengths at which a dim is a ring.
      fast, slow: the links between neighbors, and between slices.
    """
    places = np.array([(getattr(d, "slice_index", 0) or 0, *d.coords) for d in devices])
    sizes = tuple(int(size) for size in places.max(axis=0)[1:] + 1)
    on_chip = np.array([getattr(d, "core_on_chip", 0) for d in devices])
    cores = int(on_chip.max()) + 1
    if cores > 1:
        places = np.column_stack([places, on_chip])
    # A family with two dims has a third coordinate, along a dim of length 1 that is never a ring.
    joined = rings(family, sizes[: FAMILIES[family].dims]) + (False,) * 3
    return Torus(places, joined, fast, slow, cores)
