"""The compiler's own collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import Axis, rank
from jaxdist.collectives.contract import Algorithm, Combine, Kind, Traffic

REDUCTIONS: dict[Combine, Callable[..., jax.Array]] = {
    lax.add: lax.psum,
    lax.max: lax.pmax,
    lax.min: lax.pmin,
}


LANES = 128
"""Elements in a row of a TPU's vector registers."""
SUBLANES = 8
"""Rows of one: what has fewer in its last dim but one lies there in padding."""


class Xla(Algorithm):
    """`psum`, `pmax`, `psum_scatter`, `all_gather`, `all_to_all`: XLA chooses steps and order.

    Under `check_vma=True` the results of all_reduce, broadcast and reduce are typed as JAX types
    `psum`: replicated.
    """

    type: Literal["xla"] = "xla"
    """Selects this algorithm."""

    native: ClassVar[bool] = True

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return REDUCTIONS[combine](flat, axis)

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        if combine is lax.add:
            width = math.prod(blocks.shape[1:])
            tiled = blocks.ndim > 2 and blocks.shape[-2] >= SUBLANES
            # XLA:TPU refuses the form in rows for an odd number of devices greater than one.
            if tiled or width < LANES or len(blocks) % 2:
                return lax.psum_scatter(blocks, axis)
            return _scatter_rows(blocks.reshape(-1, width), axis).reshape(blocks.shape[1:])
        return REDUCTIONS[combine](blocks, axis)[rank(axis)]

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        return lax.all_gather(block, axis)

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        return lax.psum(jnp.where(rank(axis) == root, flat, jnp.zeros_like(flat)), axis)

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        return self.all_reduce(flat, axis, combine)

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        return lax.all_to_all(blocks, axis, 0, 0)

    def _traffic(self, kind: Kind, payload_bytes: float, size: int) -> Traffic:
        """A one-way ring's: the bytes are optimal, the steps are XLA's affair.

        Broadcast and reduce are all-reduces; so is a reduce-scatter of max and min.
        """
        once = kind in ("reduce_scatter", "all_gather", "all_to_all")
        steps = (1 if once else 2) * (size - 1)
        sent = steps * payload_bytes / size
        return Traffic(steps, sent, sent, 1)


def _scatter_rows(blocks: jax.Array, axis: Axis) -> jax.Array:
    """[N, c] -> [c] in rows: XLA:TPU makes of other forms all-reduces, at twice the bytes."""
    count, width = blocks.shape
    padded = jnp.pad(blocks, ((0, 0), (0, -width % LANES)))
    return lax.psum_scatter(padded.reshape(count, -1, LANES), axis).reshape(-1)[:width]
