"""Collectives over a slow and a fast network, which send few bytes over the slow network.

A fast network has g devices. Each device sends 1/g of its bytes over the slow network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import jax
from jax import lax
from pydantic import Field, field_validator

from jaxdist.collectives.algorithms.double_tree import DoubleTree
from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.single_device import unless_single_device
from jaxdist.collectives.algorithms.tree import Tree
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.axis import Axis, CollectiveError, axis_size, names, rank
from jaxdist.collectives.contract import (
    NOTHING,
    Algorithm,
    Combine,
    Operation,
    Size,
    Traffic,
    split_padded,
)

Flat = Annotated[Xla | Ring | Tree | DoubleTree | Halving, Field(discriminator="type")]
Network = Literal["inside", "across"]
PHASES: Mapping[Operation, tuple[Operation | None, Operation | None, Operation | None]] = {
    "all_reduce": ("reduce_scatter", "all_reduce", "all_gather"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter", None),
    "all_gather": (None, "all_gather", "all_gather"),
    "broadcast": ("broadcast", "broadcast", "all_gather"),
    "reduce": ("reduce_scatter", "reduce", "all_gather"),
    "all_to_all": ("all_to_all", "all_to_all", None),
}
"""The phases of each operation: inside a fast network, across networks, and inside again. Across
networks, a device sends only its own part of a fast network's data, except in an all-to-all."""


class Hierarchical(Algorithm):
    """A collective over several axes as a sequence of collectives inside and across fast networks.

    The algorithm `inside` runs on the last axis, which must be the fast network. The algorithm
    `across` runs on the other axes, which precede the last axis. Let a fast network have g devices
    with S bytes each. An all-reduce is then a reduce-scatter of S bytes inside, an all-reduce of
    S/g bytes across, and an all-gather of S bytes inside. The cost is the sum of the costs of these
    phases (`phases`).

    Summands are first added over the fast axis in the order of `inside`. These sums are then added
    in the order of `across`.
    """

    type: Literal["hierarchical"] = "hierarchical"
    """The name that selects this algorithm in a config."""
    inside: Flat = Ring()
    """The algorithm inside a fast network, which is the last axis of the collective."""
    across: Flat = Ring()
    """The algorithm across fast networks, on the other axes of the collective."""

    @field_validator("inside", "across")
    @classmethod
    def _plain_level(cls, level: Algorithm) -> Algorithm:
        for name in ("accumulate", "bucket_bytes"):
            if getattr(level, name) != Algorithm.model_fields[name].default:
                raise ValueError(
                    f"{name} has no effect on `inside` and `across`, the algorithms within "
                    f"hierarchical: set {name} on hierarchical itself"
                )
        return level

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        mine = inside.reduce_scatter(split_padded(flat, axis_size(fast)), fast, combine)
        total = across.all_reduce(mine, slow, combine)
        return inside.all_gather(total, fast).reshape(-1)[: flat.size]

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        # Consecutive blocks are for the devices of one fast network. The fast network reduces
        # first, and needs its rows in another order: after the transposition, row f has the blocks
        # for the devices that have the index f in their fast networks.
        by_fast = _transposed(blocks, axis_size(slow), axis_size(fast))
        mine = inside.reduce_scatter(by_fast.reshape(axis_size(fast), -1), fast, combine)
        return across.reduce_scatter(mine.reshape(axis_size(slow), -1), slow, combine)

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        column = across.all_gather(block, slow).reshape(-1)
        table = inside.all_gather(column, fast)
        return _transposed(table, axis_size(fast), axis_size(slow))

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        outer, inner = divmod(root, axis_size(fast))
        # The broadcast begins inside the root's fast network. Each device there then has the whole
        # array, and sends only its part of the array over the slow network.
        blocks = split_padded(inside.broadcast(flat, fast, inner), axis_size(fast))
        mine = lax.dynamic_index_in_dim(blocks, rank(fast), keepdims=False)
        mine = across.broadcast(mine, slow, outer)
        return inside.all_gather(mine, fast).reshape(-1)[: flat.size]

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        mine = inside.reduce_scatter(split_padded(flat, axis_size(fast)), fast, combine)
        # Fast networks without the root gather a result that is not used, because all devices run
        # the same program.
        mine = across.reduce(mine, slow, root // axis_size(fast), combine)
        return inside.all_gather(mine, fast).reshape(-1)[: flat.size]

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        slow, fast, across, inside = self._levels(axis)
        outer, inner = axis_size(slow), axis_size(fast)
        by_fast = _transposed(blocks, outer, inner).reshape(inner, -1)
        # The received rows have the shape [sender inside, receiver across, c]. The transposition
        # changes this to [receiver across, sender inside, c].
        arrived = _transposed(inside.all_to_all(by_fast, fast), inner, outer)
        return across.all_to_all(arrived.reshape(outer, -1), slow).reshape(blocks.shape)

    def phases(
        self, kind: Operation, payload_bytes: float, size: Size
    ) -> tuple[tuple[Network, Traffic], ...]:
        """Return the phases of a call in order, each with its network and its cost.

        Args:
          kind: the name of the operation, such as "all_reduce".
          payload_bytes: the bytes of the whole tensor on one device, as in `Algorithm.traffic`.
          size: the number of devices on each axis. The axis across the slowest network comes first,
            and the last axis is the fast network.

        Raises:
          CollectiveError: `size` has a single axis.

        >>> [level for level, _ in Hierarchical().phases("all_reduce", 1024, (2, 4))]
        ['inside', 'across', 'inside']
        """
        if not isinstance(size, tuple) or len(size) < 2:
            raise CollectiveError(
                f"hierarchical needs the sizes of two axes or more, slowest first, not {size!r}: "
                "give a tuple such as (2, 4)"
            )
        part = payload_bytes if kind == "all_to_all" else payload_bytes / size[-1]
        networks: tuple[Network, ...] = ("inside", "across", "inside")
        sizes = {"inside": size[-1:], "across": size[:-1]}
        steps = zip(networks, PHASES[kind], (payload_bytes, part, payload_bytes), strict=True)
        return tuple(
            (network, getattr(self, network).traffic(step, amount, sizes[network]))
            for network, step, amount in steps
            if step is not None
        )

    def traffic(self, kind: Operation, payload_bytes: float, size: Size) -> Traffic:
        return sum((traffic for _, traffic in self.phases(kind, payload_bytes, size)), NOTHING)

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        raise AssertionError("hierarchical: traffic adds up the phases, and _traffic is not called")

    def _levels(self, axis: Axis) -> tuple[Axis, str, Algorithm, Algorithm]:
        """Return (slow axis, fast axis, algorithm of the slow axis, algorithm of the fast axis)."""
        *outer, fast = names(axis)
        if not outer:
            raise CollectiveError(
                f"hierarchical over {axis!r} ({axis_size(axis)} devices) needs two axes, the slow "
                "one first: give a tuple such as ('data_dcn', 'data_ici'), or use Ring()"
            )
        slow = outer[0] if len(outer) == 1 else tuple(outer)
        return (
            slow,
            fast,
            unless_single_device(self.across, slow),
            unless_single_device(self.inside, fast),
        )


def _transposed(blocks: jax.Array, rows: int, columns: int) -> jax.Array:
    """Reorder blocks [rows * columns, c] from row by row to column by column."""
    return blocks.reshape(rows, columns, -1).swapaxes(0, 1).reshape(rows * columns, -1)
