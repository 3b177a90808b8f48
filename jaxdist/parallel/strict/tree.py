"""The order in which logical shards are added up: a tree that does not depend on devices.

Floating-point sums depend on their order, so the order is part of the result. Of V shards, runs of
2^a (the largest power of two that divides V) are each added as a binary tree, and the runs one
after another. A tree rather than a chain, for two reasons: adjacent shards on a device form a
subtree, which the device adds up before it sends anything; and a device that adds its shards as
they are computed keeps a + 1 sums, not V. Where V is a power of two, each device therefore sends
one gradient, as in any reduction.

    >>> Order(8).on(2), Order(12).on(4), Order(12).on(3)
    (LocalTree(shards=4, block=4), LocalTree(shards=3, block=1), LocalTree(shards=4, block=4))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.types import PyTree


@dataclass(frozen=True)
class LocalTree:
    """A device's part of the tree.

    Attributes:
      shards: number of shards on the device.
      block: how many of these, next to each other, are always a subtree; a power of two.
    """

    shards: int
    block: int

    @property
    def blocks(self) -> int:
        """The number of sums that the device contributes."""
        return self.shards // self.block

    @property
    def levels(self) -> int:
        """The number of levels of a block's tree."""
        return self.block.bit_length() - 1

    @property
    def held(self) -> int:
        """The number of sums held at once: one of each level, the blocks', and the shard's own."""
        return self.levels + self.blocks + 1


@dataclass(frozen=True)
class Order:
    """The tree over a number of logical shards."""

    shards: int

    @property
    def run(self) -> int:
        """The shards of the largest binary tree: the largest power of two that divides all."""
        return self.shards & -self.shards

    def on(self, devices: int) -> LocalTree:
        """Return each device's part, in the order of the device indices."""
        assert self.shards % devices == 0, "see jaxdist.parallel.strict.check"
        mine = self.shards // devices
        return LocalTree(mine, math.gcd(mine, self.run))

    def add(self, blocks: jax.Array) -> jax.Array:
        """Sum over the first dim of `[n, ...]`: sums of V / n shards each, in order.

        >>> [float(Order(12).add(x)) for x in (jnp.arange(12.0), jnp.full(3, 1.5))]
        [66.0, 4.5]
        """
        runs = self.shards // self.run
        # The devices may have added some levels already: the tree continues from any level.
        while len(blocks) > runs:
            pairs = blocks.reshape(len(blocks) // 2, 2, *blocks.shape[1:])
            blocks = pairs[:, 0] + pairs[:, 1]
        total = blocks[0]
        for run in blocks[1:]:
            total = total + run
        return total


def settled(tree: PyTree, *, flat: bool = True) -> PyTree:
    """Put a barrier behind the tree, so that the code after it is compiled separately.

    Args:
      flat: flatten arrays to concatenated rows, so that no memory layout is carried over, which
        would also determine an order of summation. Not for arrays that automatic axes split: it
        would gather them.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [x.reshape(-1) for x in leaves] if flat else leaves
    done = lax.optimization_barrier(rows)
    return structure.unflatten([x.reshape(of.shape) for x, of in zip(done, leaves, strict=True)])


def take_entry(tree: PyTree, number: jax.Array) -> PyTree:
    """Take the entry `number` of leaves `[n, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree)


def wide(tree: PyTree) -> PyTree:
    """Widen to dtypes that are safe for sums over shards: float32 or wider."""

    def one(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(one, tree)


def add_blocks(
    one: Callable[[jax.Array], PyTree], local: LocalTree, *, flat: bool = True
) -> PyTree:
    """Add up a device's own shards, leaves `[local.blocks, ...]`; of integers, each block's last.

    Each iteration of the loop compiles to the same code for any number of iterations: XLA does not
    know their number, and barriers separate a shard's computation from its sums.

    Args:
      one: function from a shard's number on this device to the tree to sum, in safe dtypes.
      flat: see `settled`.
    """
    shapes = jax.eval_shape(one, jnp.int32(0))

    def zeros(count: int) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def turn(number: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        waiting, blocks = carry
        found = settled(one(number), flat=flat)
        place = number % local.block
        # As many levels are complete as the place has trailing 1 bits: 0, 1, 0, 2, 0, 1, 0, 3 of a
        # block.
        complete = lax.population_count(place & ~(place + 1))
        for level in range(local.levels):
            found = jax.tree.map(partial(_joined, level, complete), waiting, found)
        found = settled(found, flat=flat)
        if local.levels:
            waiting = _put(waiting, found, jnp.minimum(complete, local.levels - 1))
        return waiting, _put(blocks, found, number // local.block)

    return turns(local.shards, turn, (zeros(local.levels), zeros(local.blocks)))[1]


def _joined(level: int, complete: jax.Array, waiting: jax.Array, x: jax.Array) -> jax.Array:
    # A counter in the buffers, such as a batch norm's, is the same for every shard; it is not a
    # sum.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(level < complete, waiting[level] + x, x)


def turns(count: int, turn: Callable[[jax.Array, PyTree], PyTree], begun: PyTree) -> PyTree:
    """Loop like `lax.fori_loop`, but never merged with the code around it."""
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(count)), turn, begun)


def _put(stacks: PyTree, leaves: PyTree, place: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0), stacks, leaves
    )
