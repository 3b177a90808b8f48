"""The order in which logical shards are added up: one tree, whatever device holds which of them.

Floating-point sums depend on their order, so the order is part of the result. Of V shards, runs of
2^a (the largest power of two that divides V) are each added as a binary tree, and the runs one
after another. A tree and not a chain, for two reasons: what lies next to each other on a device is
a subtree, which the device adds by itself before it sends anything, and one that adds its shards as
they are computed keeps a + 1 sums of them, not V. Where V is a power of two each device so sends
one gradient, as in any reduction.

    >>> Order(8).on(2), Order(12).on(4), Order(12).on(3)
    (Local(shards=4, block=4), Local(shards=3, block=1), Local(shards=4, block=4))
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
class Local:
    """What one device has of the tree.

    Attributes:
      shards: how many lie on it.
      block: how many of these, next to each other, are always a subtree; a power of two.
    """

    shards: int
    block: int

    @property
    def blocks(self) -> int:
        """The sums that it gives."""
        return self.shards // self.block

    @property
    def levels(self) -> int:
        """Of a block's tree."""
        return self.block.bit_length() - 1

    @property
    def held(self) -> int:
        """Sums that it holds at once: one of each level, the blocks', and the shard's own."""
        return self.levels + self.blocks + 1


@dataclass(frozen=True)
class Order:
    """The tree over so many logical shards."""

    shards: int

    @property
    def run(self) -> int:
        """Shards of the largest binary tree: the largest power of two that divides all."""
        return self.shards & -self.shards

    def on(self, devices: int) -> Local:
        """What each of so many devices has of it, in the order of their indices."""
        assert self.shards % devices == 0, "see jaxdist.parallel.strict.check"
        mine = self.shards // devices
        return Local(mine, math.gcd(mine, self.run))

    def add(self, blocks: jax.Array) -> jax.Array:
        """The sum over the first dim of `[n, ...]`: sums of V / n shards each, in order.

        >>> [float(Order(12).add(x)) for x in (jnp.arange(12.0), jnp.full(3, 1.5))]
        [66.0, 4.5]
        """
        runs = self.shards // self.run
        while len(blocks) > runs:
            pairs = blocks.reshape(len(blocks) // 2, 2, *blocks.shape[1:])
            blocks = pairs[:, 0] + pairs[:, 1]
        total = blocks[0]
        for run in blocks[1:]:
            total = total + run
        return total


def settled(tree: PyTree, *, flat: bool = True) -> PyTree:
    """The tree as computed before: what follows is compiled apart from it.

    Args:
      flat: as rows end to end, so that no layout in memory is carried over either, which is an
        order of summation too. Not of arrays that automatic axes split: it would gather them.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [x.reshape(-1) for x in leaves] if flat else leaves
    done = lax.optimization_barrier(rows)
    return structure.unflatten([x.reshape(of.shape) for x, of in zip(done, leaves, strict=True)])


def take(tree: PyTree, number: jax.Array) -> PyTree:
    """Of leaves `[n, ...]` those of that number."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree)


def wide(tree: PyTree) -> PyTree:
    """In dtypes that bear sums over shards: float32 at least."""

    def one(x: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if floating else x

    return jax.tree.map(one, tree)


def add_blocks(one: Callable[[jax.Array], PyTree], local: Local, *, flat: bool = True) -> PyTree:
    """A device's own sums, leaves `[local.blocks, ...]`; of integers each block's last.

    Each turn of the loop compiles to the same code however many turns there are: XLA does not see
    their number, and barriers keep what a shard computes apart from what becomes of it.

    Args:
      one: what is to be summed of the device's shard of that number, in dtypes that bear sums.
      flat: as of `settled`.
    """
    shapes = jax.eval_shape(one, jnp.int32(0))

    def zeros(count: int) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def turn(number: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        waiting, blocks = carry
        found = settled(one(number), flat=flat)
        place = number % local.block
        # As many levels are complete as the place ends in ones: 0, 1, 0, 2, 0, 1, 0, 3 of a block.
        complete = lax.population_count(place & ~(place + 1))
        for level in range(local.levels):
            found = jax.tree.map(partial(_joined, level, complete), waiting, found)
        found = settled(found, flat=flat)
        if local.levels:
            waiting = _put(waiting, found, jnp.minimum(complete, local.levels - 1))
        return waiting, _put(blocks, found, number // local.block)

    return turns(local.shards, turn, (zeros(local.levels), zeros(local.blocks)))[1]


def _joined(level: int, complete: jax.Array, waiting: jax.Array, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.where(level < complete, waiting[level] + x, x)


def turns(count: int, turn: Callable[[jax.Array, PyTree], PyTree], begun: PyTree) -> PyTree:
    """`lax.fori_loop`, whose body is not compiled into what is around it: not even of one turn."""
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(count)), turn, begun)


def _put(stacks: PyTree, leaves: PyTree, place: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, place, 0), stacks, leaves
    )
