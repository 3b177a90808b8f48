"""Collectives by recursive halving and doubling, which send the fewest bytes in few steps."""

from __future__ import annotations

from typing import Literal

import jax

from jaxdist.collectives.algorithms import binomial, circulant
from jaxdist.collectives.axis import Axis, axis_size, shift
from jaxdist.collectives.contract import Combine, Operation, Traffic, split_padded


class Halving(circulant.Circulant):
    """Recursive halving and doubling, for any number N of devices with S bytes each.

    Reduce-scatter and all-gather take L = ceil(log2 N) steps each, and send (N-1)/N S bytes. An
    all-reduce is a reduce-scatter followed by an all-gather, takes 2 L steps (2 fewer for N = 3, 5
    and 6), and sends 2 (N-1)/N S bytes. N need not be a power of two (`circulant.py`). On two
    devices an all-reduce is a single step, in which each device sends all of its S bytes. An
    all-to-all takes L steps, of S/2 bytes each if N is a power of two. Broadcast and reduce run as
    in `Tree`.

    The order of summation for the block of device d is a balanced tree of depth L over x[d],
    x[d-1], ..., with indices modulo N. For N = 4 the sum is (x[d] + x[d-2]) + (x[d-1] + x[d-3]).
    """

    type: Literal["halving"] = "halving"
    """The name that selects this algorithm in a config."""

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        if axis_size(axis) == 2:
            # The two devices add in opposite orders but get equal bits, because addition of two
            # floating-point numbers is commutative.
            return combine(flat, shift(flat, axis, 1))
        blocks = split_padded(flat, axis_size(axis))
        mine = self.reduce_scatter(blocks, axis, combine)
        # `blocks` is not used again, so its memory can hold the result.
        return circulant.all_gather(mine, axis, blocks.reshape(-1))[: flat.size]

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        if kind in ("broadcast", "reduce"):
            return binomial.traffic(kind, payload_bytes, [binomial.rooted(0, size)])
        if kind == "all_reduce" and size == 2:
            return Traffic(1, payload_bytes, payload_bytes, 1)
        return circulant.traffic(kind, payload_bytes, size)
