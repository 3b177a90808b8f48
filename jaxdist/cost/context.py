"""Attention over a sequence that several devices share: methods, bytes, and order of positions.

The C devices of mesh axis `context` form R groups of U devices each. Within a group, devices
exchange the split of the sequence for a split of the heads (Ulysses, Jacobs et al. 2023, arXiv
2309.14509). Between the groups, keys and values are gathered, or rotate around a ring (ring
attention, Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Way = Literal["gather", "ring", "ulysses", "ring_ulysses", "gather_ulysses"]
Order = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True)
class SequenceSplit:
    """The method by which devices that share a sequence compute the sequence's attention.

    Attributes:
      axes: the names of the mesh axes that split the sequence.
      size: the number of devices that share a sequence, C.
      swapped: the number of devices in a group, U. The devices of a group exchange the split of
        the sequence for a split of the heads.
      rotates: whether keys and values rotate among the C / U groups, instead of being gathered.
      order: the order of the positions of a training batch over the groups.
    """

    axes: tuple[str, ...]
    size: int
    swapped: int = 1
    rotates: bool = False
    order: Order = "contiguous"

    @property
    def groups(self) -> int:
        """The number of groups between which keys and values move, R."""
        return self.size // self.swapped

    @property
    def way(self) -> Way:
        """The name of the method by which the devices share the sequence."""
        if self.groups == 1:
            return "ulysses"
        if self.swapped > 1:
            return "ring_ulysses" if self.rotates else "gather_ulysses"
        return "ring" if self.rotates else "gather"

    def describe(self) -> str:
        """Return the name of the method, and the size of a group if there are several groups.

        The size is shown only if each group has several devices.
        """
        return f"{self.way} of {self.swapped}" if 1 < self.swapped < self.size else self.way


def positions_of(order: Order, length: int, groups: int) -> np.ndarray:
    """Return the positions of a sequence in the given order, int32 `[length]`.

    Entry i is the position of the i-th token. The result has `groups` equal parts, and group g has
    part g.

    >>> positions_of("zigzag", 8, 2).tolist(), positions_of("striped", 8, 2).tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 2, 4, 6, 1, 3, 5, 7])
    """
    found = np.arange(length, dtype=np.int32)
    if order == "striped":
        return found.reshape(-1, groups).T.reshape(-1)
    if order == "zigzag":
        chunks = found.reshape(2 * groups, -1)
        return np.stack([chunks[:groups], chunks[groups:][::-1]], 1).reshape(-1)
    return found


@dataclass(frozen=True)
class ContextNeeds:
    """The attention of a layer on a device, before a method to share a sequence is chosen.

    Attributes:
      heads, kv_heads: the numbers of heads of a device before the heads are split among devices
        that share a sequence.
      head_dim: the number of features of a head.
      length: the length of a sequence.
      rows: the number of sequences of a device.
      itemsize: the bytes of a number in an activation.
      window, causal: the fields of `AttentionRequest` with these names.
      fused: whether the model's attention is a kernel, which does not compute block by block.
      rotates: whether keys may rotate, which is false in a pipeline.
      gathers: whether a kernel computes attention to gathered keys. Such a kernel is faster than a
        ring, whose attention is computed block by block.
    """

    heads: int
    kv_heads: int
    head_dim: int
    length: int
    rows: int = 1
    itemsize: int = 2
    window: int | None = None
    causal: bool = True
    fused: bool = False
    gathers: bool = False
    rotates: bool = True

    def hops(self, split: SequenceSplit) -> int:
        """Return the number of times that keys and values move to the next group.

        With a causal window and contiguous positions, keys need not reach all groups.
        """
        most = split.groups - 1
        if self.window is None or not self.causal or split.order != "contiguous":
            return most
        return min(most, -(-self.window // (self.length // split.groups)))

    def bytes_received(self, split: SequenceSplit) -> tuple[float, float]:
        """Return the bytes that a device receives in the forward and in the backward pass.

        Gradients of keys and values are sent in float32. In the backward pass, keys and values are
        gathered or rotate again, so that no device keeps the keys and values of other devices.
        """
        piece = self.rows * self.length / split.size * self.head_dim
        keys = 2 * piece * self.kv_heads
        swapped = (split.swapped - 1) / split.swapped
        exchanged = 2 * piece * (self.heads + self.kv_heads) * swapped * self.itemsize
        hops = self.hops(split) if split.rotates else split.groups - 1
        moved = hops * keys * self.itemsize
        return exchanged + moved, exchanged + moved + hops * keys * 4

    def computes(self, split: SequenceSplit) -> bool:
        """Return whether the attention kernel can compute the attention of a split."""
        if split.rotates and not self.rotates:
            return False
        return not self.fused or split.groups == 1 or (self.gathers and not split.rotates)

    def why_not(self, split: SequenceSplit) -> str | None:
        """Return why these heads do not fit a split, or None if the heads fit.

        The reason is a clause without a subject.
        """
        if self.heads % split.swapped or self.kv_heads % split.swapped:
            most = max(n for n in _divisors(split.size) if self.kv_heads % n == 0)
            return (
                f"exchanges heads among {split.swapped} devices, but this number must divide the "
                f"{self.kv_heads} kv_heads of a device: use at most {most} devices"
            )
        return None


def _divisors(size: int) -> Iterator[int]:
    return (n for n in range(1, size + 1) if size % n == 0)


def splits_of(way: Way | Literal["auto"], axes: tuple[str, ...], size: int) -> list[SequenceSplit]:
    """Return the possible splits of a sequence over devices.

    Args:
      way: the method of the splits, or "auto" for the splits of all methods.
      axes: the mesh axes over which the sequence is split.
      size: the number of devices along `axes`.
    """
    ring = SequenceSplit(axes, size, rotates=True)
    mixed = [replace(ring, swapped=n) for n in _divisors(size) if 1 < n < size]
    found: dict[str, list[SequenceSplit]] = {
        "ulysses": [replace(ring, swapped=size, rotates=False)],
        "ring_ulysses": mixed,
        "ring": [ring],
        "gather": [replace(ring, rotates=False)],
        "gather_ulysses": [replace(one, rotates=False) for one in mixed],
    }
    return found[way] if way != "auto" else [one for each in found.values() for one in each]


def best_split(
    splits: list[SequenceSplit], needs: ContextNeeds
) -> tuple[SequenceSplit, str] | None:
    """Return the split with the fewest received bytes and the reason, or None if no split fits.

    If several splits have equal bytes, the first of these splits is returned. `splits_of` lists a
    ring before a gather, since every device needs memory for all keys in a gather. If a kernel
    computes attention to gathered keys (`needs.gathers`), a ring is returned only if no other split
    fits.
    """
    fitting = [one for one in splits if needs.why_not(one) is None and needs.computes(one)]
    if not fitting:
        return None
    by_block = {one: needs.gathers and one.rotates for one in fitting}
    ranked = sorted(fitting, key=lambda one: (by_block[one], sum(needs.bytes_received(one))))
    shown = ", ".join(
        f"{one.describe()} {sum(needs.bytes_received(one)) / 1e6:.3g} MB" for one in ranked
    )
    return ranked[0], f"bytes that a device receives in a layer and step: {shown}"


def near_lengths(length: int, parts: int) -> str:
    """Return the multiples of `parts` that are nearest to `length`, as text."""
    low = length // parts * parts
    return " or ".join(str(n) for n in (low, low + parts) if n)


def near_parts(length: int, parts: int) -> str:
    """Return the divisors of `length` that are nearest to `parts`, as text."""
    fitting = sorted(_divisors(length), key=lambda n: abs(math.log2(n / parts)))[:2]
    return " or ".join(map(str, sorted(fitting)))
