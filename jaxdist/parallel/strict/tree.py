"""The order in which logical shards are added up: a tree, the same for any number of devices.

Floating-point sums depend on their order, so the order must be fixed. V shards are divided into
runs of 2^a shards, where 2^a is the largest power of two that divides V. Each run is added as a
binary tree, and the sums of the runs are added one after another. A tree has two advantages over a
chain. Adjacent shards on a device form a subtree, which the device adds up before it sends a
message. And a device that adds each shard as soon as the shard is computed holds a + 1 sums instead
of V. If V is a power of two, each device therefore sends a single gradient, as in any reduction.

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
    """The part of the tree of sums that one device adds up.

    Attributes:
      shards: the number of logical shards on the device.
      block: the number of adjacent shards in a block, a power of two. Each block is a subtree.
    """

    shards: int
    block: int

    @property
    def blocks(self) -> int:
        """The number of blocks on the device, each of which has one sum."""
        return self.shards // self.block

    @property
    def levels(self) -> int:
        """The number of levels of the tree in which the shards of one block are added up."""
        return self.block.bit_length() - 1

    @property
    def held(self) -> int:
        """The number of trees in memory at a time.

        One tree is the shard that is added; the others are the sums of the levels and blocks.
        """
        return self.levels + self.blocks + 1


@dataclass(frozen=True)
class Order:
    """The order of summation of a number of logical shards.

    Attributes:
      shards: the number of logical shards, V.
    """

    shards: int

    @property
    def run(self) -> int:
        """The number of adjacent shards that are added up as a binary tree.

        The number is the largest power of two that divides `shards`. The sums of several such trees
        are added one after another.
        """
        return self.shards & -self.shards

    def on(self, devices: int) -> LocalTree:
        """Return the part of the tree of sums that each of `devices` devices adds up."""
        assert self.shards % devices == 0, "see jaxdist.parallel.strict.check"
        mine = self.shards // devices
        return LocalTree(mine, math.gcd(mine, self.run))

    def add(self, blocks: jax.Array) -> jax.Array:
        """Add up an array `[n, ...]` over its first dim in the order of the tree.

        Each of the n entries is the sum of `shards` / n adjacent shards.

        >>> [float(Order(12).add(x)) for x in (jnp.arange(12.0), jnp.full(3, 1.5))]
        [66.0, 4.5]
        """
        runs = self.shards // self.run
        # The devices may have added some levels of the tree already. The loop adds the levels that
        # remain.
        while len(blocks) > runs:
            pairs = blocks.reshape(len(blocks) // 2, 2, *blocks.shape[1:])
            blocks = pairs[:, 0] + pairs[:, 1]
        total = blocks[0]
        for run in blocks[1:]:
            total = total + run
        return total


def settled(tree: PyTree, *, flat: bool = True) -> PyTree:
    """Return a tree behind a barrier, between the code that computes the tree and later code.

    Args:
      tree: the tree that the barrier protects.
      flat: whether to flatten arrays at the barrier. XLA then cannot propagate a memory layout
        across the barrier. Such a layout could change an order of summation. Arrays that auto axes
        split must not be flattened, because flattening would gather them.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [x.reshape(-1) for x in leaves] if flat else leaves
    done = lax.optimization_barrier(rows)
    return structure.unflatten([x.reshape(of.shape) for x, of in zip(done, leaves, strict=True)])


def take_entry(tree: PyTree, number: jax.Array) -> PyTree:
    """Return the entry `number` of each leaf `[n, ...]`."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree)


def add_blocks(
    one: Callable[[jax.Array], PyTree], local: LocalTree, *, flat: bool = True
) -> PyTree:
    """Compute the shards of a device, and add them up to blocks.

    An integer leaf is not added up: each block has the leaf of its last shard. An iteration of the
    loop compiles to the same code for any number of iterations. XLA does not know this number, and
    barriers separate the computation of a shard from the sums.

    Args:
      one: the function from the number of a shard on this device to the tree to sum, whose leaves
        have the dtypes of `jaxdist.trees.wide`.
      local: the part of the tree on this device.
      flat: whether to flatten arrays before the barriers, as in `settled`.

    Returns:
      The sums of the blocks, leaves `[local.blocks, ...]`.
    """
    shapes = jax.eval_shape(one, jnp.int32(0))

    def zeros(count: int) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def turn(number: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        waiting, blocks = carry
        found = settled(one(number), flat=flat)
        place = number % local.block
        # After the shard with index `place` in its block, the number of complete levels is the
        # number of trailing 1 bits of `place`: 0, 1, 0, 2, 0, 1, 0, 3, ...
        complete = lax.population_count(place & ~(place + 1))
        for level in range(local.levels):
            found = jax.tree.map(partial(_joined, level, complete), waiting, found)
        found = settled(found, flat=flat)
        # The sum of a complete block waits at no level. This sum is written to the last level here,
        # but the next block overwrites it before it is read.
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
    """Run a loop like `lax.fori_loop` that XLA never merges with the code around the loop.

    A barrier hides the number of iterations from XLA, which would otherwise inline a loop with a
    single iteration.

    Args:
      count: the number of iterations.
      turn: the function from the number of the iteration and the carry to the next carry.
      begun: the carry before the first iteration.
    """
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(count)), turn, begun)


def _put(stacks: PyTree, leaves: PyTree, place: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0), stacks, leaves
    )
