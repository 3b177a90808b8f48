"""The order in which logical shards are added up: a tree that does not depend on devices.

Floating-point sums depend on their order, so the order must be fixed. V shards are divided into
runs of 2^a shards, the largest power of two that divides V. Each run is added as a binary tree, and
the sums of the runs are added one after another. A tree is better than a chain for two reasons:
adjacent shards on a device form a subtree, which the device adds up before it sends anything; and a
device that adds each shard when it is computed keeps a + 1 sums, not V. If V is a power of two,
each device therefore sends one gradient, as in any reduction.

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
      block: number of adjacent shards that always form a subtree; a power of two.
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
        """The number of sums in memory at once: one per level, one per block, and a shard's own."""
        return self.levels + self.blocks + 1


@dataclass(frozen=True)
class Order:
    """The tree over a number of logical shards."""

    shards: int

    @property
    def run(self) -> int:
        """The number of shards of a binary tree: the largest power of two that divides `shards`."""
        return self.shards & -self.shards

    def on(self, devices: int) -> LocalTree:
        """Return the part of the tree that each of `devices` devices adds up."""
        assert self.shards % devices == 0, "see jaxdist.parallel.strict.check"
        mine = self.shards // devices
        return LocalTree(mine, math.gcd(mine, self.run))

    def add(self, blocks: jax.Array) -> jax.Array:
        """Add up `[n, ...]`, the sums of V / n shards each, over the first dim in the tree's order.

        >>> [float(Order(12).add(x)) for x in (jnp.arange(12.0), jnp.full(3, 1.5))]
        [66.0, 4.5]
        """
        runs = self.shards // self.run
        # The devices may have added some levels already, so this loop begins at any level.
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
      flat: whether to flatten arrays before the barrier. A memory layout, which also determines an
        order of summation, then ends at the barrier. Arrays that automatic axes split must not be
        flattened, because flattening would gather them.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [x.reshape(-1) for x in leaves] if flat else leaves
    done = lax.optimization_barrier(rows)
    return structure.unflatten([x.reshape(of.shape) for x, of in zip(done, leaves, strict=True)])


def take_entry(tree: PyTree, number: jax.Array) -> PyTree:
    """Return the entry `number` of each leaf `[n, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree)


def wide(tree: PyTree) -> PyTree:
    """Convert floating leaves to dtypes that are safe for sums over shards: float32 or wider."""

    def one(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(one, tree)


def add_blocks(
    one: Callable[[jax.Array], PyTree], local: LocalTree, *, flat: bool = True
) -> PyTree:
    """Add up a device's own shards to leaves `[local.blocks, ...]`.

    Integer leaves are not added up: each block keeps the leaf of its last shard.

    An iteration of the loop compiles to the same code for any number of iterations, because XLA
    does not know the number, and because barriers separate a shard's computation from the sums.

    Args:
      one: function from a shard's number on this device to the tree to sum, in dtypes of `wide`.
      flat: as for `settled`.
    """
    shapes = jax.eval_shape(one, jnp.int32(0))

    def zeros(count: int) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def turn(number: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        waiting, blocks = carry
        found = settled(one(number), flat=flat)
        place = number % local.block
        # The number of complete levels is that of the trailing 1 bits of the place: 0, 1, 0, 2, 0,
        # 1, 0, 3, ...
        complete = lax.population_count(place & ~(place + 1))
        for level in range(local.levels):
            found = jax.tree.map(partial(_joined, level, complete), waiting, found)
        found = settled(found, flat=flat)
        # A complete block waits at no level: its write to the last level is overwritten unread.
        if local.levels:
            waiting = _put(waiting, found, jnp.minimum(complete, local.levels - 1))
        # Each iteration overwrites the entry of its block, so that the complete sum remains.
        return waiting, _put(blocks, found, number // local.block)

    return turns(local.shards, turn, (zeros(local.levels), zeros(local.blocks)))[1]


def _joined(level: int, complete: jax.Array, waiting: jax.Array, x: jax.Array) -> jax.Array:
    # An integer buffer, such as a batch norm's counter, is the same for every shard, so it must not
    # be added up.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(level < complete, waiting[level] + x, x)


def turns(count: int, turn: Callable[[jax.Array, PyTree], PyTree], begun: PyTree) -> PyTree:
    """Run a loop like `lax.fori_loop`, which XLA never merges with the code around it.

    The barrier hides the number of iterations from XLA, which would inline a single iteration.
    """
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(count)), turn, begun)


def _put(stacks: PyTree, leaves: PyTree, place: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0), stacks, leaves
    )
