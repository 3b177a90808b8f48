"""The sum over all logical shards: the devices' sums are added in a fixed order.

The code runs inside a `jax.shard_map`. Each device receives its part of the elements from all
devices, and adds the received sums in the order of `jaxdist.parallel.strict.tree`. Results that
must be whole are then gathered. If each device contributes a single sum, the number of sent bytes
is the same as for a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.bucket import BUCKET_BYTES, in_buckets, plan_buckets, unpack
from jaxdist.collectives.operations import all_gather, all_to_all
from jaxdist.hlo.source.marks import begins, ends
from jaxdist.optim.safety import total_square
from jaxdist.parallel.strict.pieces import once
from jaxdist.parallel.strict.tree import Order, settled, take_entry, turns
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.types import Grads, PyTree


@dataclass(frozen=True)
class Reduction:
    """The sum of the blocks of all devices.

    A block is the sum of some adjacent logical shards, and each device has one block or several
    (`jaxdist.parallel.strict.tree.add_blocks`).

    Attributes:
      order: the order in which shards are added up.
      axes: the manual mesh axes over which the shards are distributed. The axis across the slowest
        network comes first.
      devices: the number of devices along these axes.
      zero: the split of the sums over these axes.
    """

    order: Order
    axes: tuple[str, ...]
    devices: int
    zero: ZeroSplit

    def everywhere(self, blocks: PyTree) -> PyTree:
        """Gather the blocks of all devices on every device, and sum all logical shards there.

        The function is meant for small leaves `[blocks, ...]`. An integer leaf is not summed: the
        result is its last block.
        """

        def total(flat: jax.Array) -> jax.Array:
            # The barrier separates the sum from the gather. The code of the sum must be the same
            # for any number of devices, and the code of the gather is not.
            return self.order.add(lax.optimization_barrier(all_gather(flat, self.axes)))

        leaves, structure = jax.tree.flatten(blocks)
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        found = [x[-1] for x in leaves]
        sums = _in_buckets(total, [begins(leaves[i], self.axes, i) for i in floating])
        for i, leaf in zip(floating, sums, strict=True):
            found[i] = ends(leaf, self.axes, i)
        return structure.unflatten(found)

    def mean_like(self, total: jax.Array, like: jax.Array) -> jax.Array:
        """Divide a sum over the shards by the number of shards, and return it in `like`'s dtype.

        An integer is returned unchanged.
        """
        floating = jnp.issubdtype(like.dtype, jnp.inexact)
        return (total / self.order.shards).astype(like.dtype) if floating else total

    def total(self, blocks: Grads) -> PyTree:
        """Sum the blocks `[blocks, ...]` of all devices, in the order of the tree.

        Returns:
          This device's shard of the sum of each tensor that ZeRO splits, and the whole sum of each
          other tensor.
        """
        leaves, structure = jax.tree.flatten(blocks)
        leaves = [begins(x, self.axes, i) for i, x in enumerate(leaves)]
        dims = self.zero.dims_of(blocks)
        whole = [i for i, dim in enumerate(dims) if dim is None]
        split = [i for i, dim in enumerate(dims) if dim is not None]
        cut = [self._cut(leaves[i], dims[i]) for i in split]
        totals = _in_buckets(self._whole, [leaves[i] for i in whole])
        parts = _in_buckets(self._part, cut, lead=2)
        for i, leaf in zip([*whole, *split], [*totals, *parts], strict=True):
            leaves[i] = ends(leaf, self.axes, i, dims[i])
        return structure.unflatten(leaves)

    def _cut(self, blocks: jax.Array, dim: int | None) -> jax.Array:
        """Divide a dim of each block among devices: `[blocks, ...]` to `[devices, blocks, ...]`.

        The dim is padded with zeros to a multiple of the number of logical shards, as in
        `plan_zero`. The index `dim` does not count the dim of blocks.
        """
        assert dim is not None
        rows = jnp.moveaxis(blocks, dim + 1, 1)
        filled = [(0, 0), (0, -rows.shape[1] % self.order.shards)]
        rows = jnp.pad(rows, filled + [(0, 0)] * (rows.ndim - 2))
        parts = rows.reshape(len(rows), self.devices, -1, *rows.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(parts, 1, 0), 2, dim + 2)

    def _whole(self, flat: jax.Array) -> jax.Array:
        """Sum the blocks `[blocks, n]` of all devices, and return the sum `[n]` on every device."""
        size = flat.shape[1]
        flat = jnp.pad(flat, [(0, 0), (0, -size % self.devices)])
        parts = jnp.moveaxis(flat.reshape(len(flat), self.devices, -1), 1, 0)
        return all_gather(self._part(parts), self.axes, size=size)

    def _part(self, parts: jax.Array) -> jax.Array:
        """Send part i of `[devices, blocks, n]` to device i, and sum received parts to `[n]`."""
        arrived = all_to_all(parts, self.axes)
        return self.order.add(arrived.reshape(-1, parts.shape[-1]))

    def square(self, shards: Grads) -> jax.Array:
        """Sum the squares of all elements of a tree that ZeRO splits over several devices.

        A tensor that ZeRO does not split is whole on each device, and is counted once.
        """
        leaves, dims, count = (
            jax.tree.leaves(shards),
            self.zero.dims_of(shards),
            self.order.on(self.devices).shards,
        )
        # A shard is divided into pieces that have the same shape on any number of devices, so the
        # sum of a piece has the same bits.
        pieces = [
            (rows := jnp.moveaxis(x, dim, 0)).reshape(count, -1, *rows.shape[1:])
            for x, dim in zip(leaves, dims, strict=True)
            if dim is not None
        ]

        def turn(number: jax.Array, squares: jax.Array) -> jax.Array:
            piece = settled(take_entry(pieces, number))
            return squares.at[number].set(total_square(piece, []))

        squares = turns(count, turn, jnp.zeros(count, jnp.float32))
        rest = [x for x, dim in zip(leaves, dims, strict=True) if dim is None]
        total = self.order.add(all_gather(squares, self.axes))
        (whole,) = once(lambda rest, _: (total_square(rest, []),), [rest, jnp.float32(0)], ())
        return total + whole


def _in_buckets(
    function: Callable[[jax.Array], jax.Array], leaves: Sequence[jax.Array], *, lead: int = 1
) -> list[jax.Array]:
    """Apply `function` to several leaves at a time in buckets, to send fewer messages.

    Args:
      function: the function from an array with `lead` first dims and a dim n to an array `[n]`.
      leaves: the arrays, which are flattened after the `lead` first dims and concatenated.
      lead: the number of first dims.

    Returns:
      The result for each leaf, in the shape of the leaf without its `lead` first dims.
    """
    flat = [x.reshape(*x.shape[:lead], -1) for x in leaves]
    shapes = [jax.ShapeDtypeStruct(x.shape[lead:], x.dtype) for x in leaves]

    def result(bucket: list[int]) -> list[jax.Array]:
        whole = function(jnp.concatenate([flat[i] for i in bucket], axis=-1))
        return unpack(whole, [shapes[i] for i in bucket])

    return in_buckets(result, plan_buckets(flat, BUCKET_BYTES))
