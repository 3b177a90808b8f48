"""Collectives along two trees, each of which carries half of the data.

Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.collectives.algorithms import binomial, circulant
from jaxdist.collectives.algorithms.binomial import Places
from jaxdist.collectives.axis import Axis, axis_size
from jaxdist.collectives.contract import Combine, Operation, Traffic


class DoubleTree(circulant.Circulant):
    """All-reduce, broadcast and reduce along two binomial trees at the same time.

    There are N devices with S bytes each. The inner nodes of each tree are leaves of the other
    tree. An all-reduce takes 2 L steps of S/2 bytes in each tree, where L = ceil(log2 N). There are
    as many steps as in `Tree`, and each step sends half of the bytes. No device sends more than
    (L+2)/2 S bytes. The trees are not pipelined. The other operations run as in `Halving`.

    The order of summation is the order of `Tree`. The tree of the first half of the elements starts
    from device 0, and the tree of the second half from device N-1 (N-1, 0, 1, ...).
    """

    type: Literal["double_tree"] = "double_tree"
    """The name that selects this algorithm in a config."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        def run(half: jax.Array, places: Places) -> jax.Array:
            return binomial.broadcast(binomial.reduce(half, axis, places, combine), axis, places)

        return _halves(run, flat, _two_roots(axis_size(axis)))

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        def run(half: jax.Array, places: Places) -> jax.Array:
            return binomial.broadcast(half, axis, places)

        return _halves(run, flat, _one_root(root, axis_size(axis)))

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        def run(half: jax.Array, places: Places) -> jax.Array:
            return binomial.reduce(half, axis, places, combine)

        return _halves(run, flat, _one_root(root, axis_size(axis)))

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        if kind == "all_reduce":
            return binomial.traffic(kind, payload_bytes, _two_roots(size))
        if kind in ("broadcast", "reduce"):
            return binomial.traffic(kind, payload_bytes, _one_root(0, size))
        return circulant.traffic(kind, payload_bytes, size)


def _halves(
    run: Callable[[jax.Array, Places], jax.Array], flat: jax.Array, trees: list[Places]
) -> jax.Array:
    middle = -(-flat.size // 2)
    halves = zip((flat[:middle], flat[middle:]), trees, strict=True)
    # If there is a single element, the second half is empty, and no messages are sent for it.
    return jnp.concatenate([run(half, places) for half, places in halves if half.size])


def _two_roots(size: int) -> list[Places]:
    """Return two trees with the roots 0 and size - 1.

    The odd devices are leaves of the first tree, and the even devices are leaves of the second
    tree.
    """
    return [binomial.rooted(0, size), binomial.rooted(size - 1, size)]


def _one_root(root: int, size: int) -> list[Places]:
    """Return two trees with the same root.

    In the second tree, the devices of all nodes except the root are rotated by one node.
    """
    first = binomial.rooted(root, size)
    return [first, (first[0], *first[2:], first[1])]
