"""Collectives along a binomial tree, which take the fewest steps and are for small arrays."""

from __future__ import annotations

from typing import Literal

import jax

from jaxdist.collectives.algorithms import binomial, circulant
from jaxdist.collectives.axis import Axis, axis_size
from jaxdist.collectives.contract import Combine, Operation, Traffic


class Tree(circulant.Circulant):
    """A binomial tree, for any number N of devices with S bytes each.

    Reduce and broadcast take L = ceil(log2 N) steps of S bytes each. An all-reduce is a reduction
    to device 0 followed by a broadcast, and takes 2 L steps of S bytes. The root sends L S bytes,
    because it has L children. Reduce-scatter, all-gather and all-to-all run as in `Halving`, in L
    steps too.

    The order of summation is a balanced tree that starts from device 0: ((x[0] + x[1]) + (x[2] +
    x[3])) + .... For a reduce, the tree starts from the root.
    """

    type: Literal["tree"] = "tree"
    """The name that selects this algorithm in a config."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        # One device computes the sum, and the others copy it, so all devices have the same bits.
        places = binomial.rooted(0, axis_size(axis))
        return binomial.broadcast(binomial.reduce(flat, axis, places, combine), axis, places)

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        if kind in ("all_reduce", "broadcast", "reduce"):
            return binomial.traffic(kind, payload_bytes, [binomial.rooted(0, size)])
        return circulant.traffic(kind, payload_bytes, size)
