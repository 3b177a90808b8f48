"""A binomial tree: the fewest steps, for arrays so small that latency is their whole cost."""

from __future__ import annotations

from typing import Literal

import jax

from jaxdist.collectives.algorithms import binomial, circulant
from jaxdist.collectives.axis import Axis, axis_size
from jaxdist.collectives.contract import Combine, Operation, Traffic


class Tree(circulant.Circulant):
    """A reduction to a device and a broadcast along a binomial tree, L = ceil(log2 N) steps each.

    An all-reduce takes 2 L steps of S bytes; the root sends L S bytes, because it has L children.
    Operations without a root (reduce-scatter, all-gather, all-to-all) are those of `Halving`, in L
    steps too.

    The order of summation is a balanced tree that starts from device 0, ((x[0] + x[1]) + (x[2] +
    x[3])) + ...; for a reduce, the tree starts from the root.
    """

    type: Literal["tree"] = "tree"
    """The name that selects this algorithm in a config."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        # One device adds up the sum, which is then copied, so all devices have the same bits.
        places = binomial.rooted(0, axis_size(axis))
        return binomial.broadcast(binomial.reduce(flat, axis, places, combine), axis, places)

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        if kind in ("all_reduce", "broadcast", "reduce"):
            return binomial.traffic(kind, payload_bytes, [binomial.rooted(0, size)])
        return circulant.traffic(kind, payload_bytes, size)
