"""Two trees with half of the data each, so that no device sends everything.

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
    """Two simultaneous binomial trees: the inner devices of each are leaves of the other.

    An all-reduce takes 2 L steps of S/2 bytes in each tree, where L = ceil(log2 N): half the bytes
    of `Tree` in as many steps. No device sends more than (L+2)/2 S bytes. The trees are not
    pipelined. Operations without a root are those of `Halving`.

    The order of summation is that of `Tree`, starting from device 0 for the first half of the
    elements, and from device N-1 for the second half (N-1, 0, 1, ...).
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
    # The second half of a single element is empty, and nothing is sent for it.
    return jnp.concatenate([run(half, places) for half, places in halves if half.size])


def _two_roots(size: int) -> list[Places]:
    """Return two trees: the odd devices are leaves of the first, the even devices of the second."""
    return [binomial.rooted(0, size), binomial.rooted(size - 1, size)]


def _one_root(root: int, size: int) -> list[Places]:
    """Return two trees with the same root; all other devices are moved by a place in the second."""
    first = binomial.rooted(root, size)
    return [first, (first[0], *first[2:], first[1])]
