"""The algorithm `Xla`, which calls the collectives of JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import Axis, rank
from jaxdist.collectives.contract import Algorithm, Combine, Operation, Traffic


def _ordered(extremum: Callable[..., jax.Array], x: jax.Array, axis: Axis) -> jax.Array:
    """Compute `pmax` or `pmin` such that a NaN on any device gives NaN.

    Some of XLA's backends ignore NaN. Floats are therefore mapped to integers in the same order, in
    which NaN is beyond the infinities.
    """
    if x.dtype == jnp.bool_:
        return extremum(x.astype(jnp.uint8), axis).astype(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extremum(x, axis)
    bits = _bits(x)
    beyond = jnp.iinfo(bits.dtype).max if extremum is lax.pmax else jnp.iinfo(bits.dtype).min
    ordered = jnp.where(jnp.isnan(x), beyond, _flipped(bits))
    return _float(_flipped(extremum(ordered, axis)), x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of floats as integers of four or eight bytes, which all backends reduce."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return lax.bitcast_convert_type(wide, jnp.dtype(f"int{8 * wide.dtype.itemsize}"))


def _float(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert the integers that `_bits` returns back to floats of `dtype`."""
    return lax.bitcast_convert_type(bits, jnp.dtype(f"float{8 * bits.dtype.itemsize}")).astype(
        dtype
    )


def _of_root(x: jax.Array, axis: Axis, root: int) -> jax.Array:
    return lax.psum(jnp.where(rank(axis) == root, x, jnp.zeros_like(x)), axis)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _broadcast_float(x: jax.Array, axis: Axis, root: int) -> jax.Array:
    """Broadcast floats by a sum of integers with the same bits, to keep the sign of -0.0.

    All devices except the root add zeros. As floats, -0.0 + 0.0 would be 0.0.
    """
    return _float(_of_root(_bits(x), axis, root), x.dtype)


@_broadcast_float.defjvp
def _broadcast_tangent(
    axis: Axis, root: int, x: tuple[jax.Array], tangent: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (value,), (change,) = x, tangent
    return _broadcast_float(value, axis, root), _of_root(change, axis, root)


def _flipped(bits: jax.Array) -> jax.Array:
    """Map the bits of floats to integers in the same order as the floats, or map them back.

    The map inverts all bits of negative floats except the sign, and is its own inverse.
    """
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


REDUCTIONS: dict[Combine, Callable[..., jax.Array]] = {
    lax.add: lax.psum,
    lax.max: partial(_ordered, lax.pmax),
    lax.min: partial(_ordered, lax.pmin),
}

LANES = 128
"""The number of elements in a row of a TPU's vector register."""
SUBLANES = 8
"""The number of rows of a TPU's vector register. An array with fewer rows is padded to this number.
"""


class Xla(Algorithm):
    """The collectives of JAX (`psum`, `pmax`, ...), whose steps and order of summation XLA chooses.

    With `check_vma=True`, JAX types the results of all_reduce, broadcast and reduce as replicated.
    """

    type: Literal["xla"] = "xla"
    """The name that selects this algorithm in a config."""

    native: ClassVar[bool] = True

    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        return REDUCTIONS[combine](flat, axis)

    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        if combine is lax.add:
            width = math.prod(blocks.shape[1:])
            tiled = blocks.ndim > 2 and blocks.shape[-2] >= SUBLANES
            # XLA:TPU refuses `_scatter_rows` for an odd number of devices greater than 1.
            if tiled or width < LANES or len(blocks) % 2:
                return lax.psum_scatter(blocks, axis)
            return _scatter_rows(blocks.reshape(-1, width), axis).reshape(blocks.shape[1:])
        return REDUCTIONS[combine](blocks, axis)[rank(axis)]

    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        return lax.all_gather(block, axis)

    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        # The bits of a complex number cannot be summed as one integer, so the real part and the
        # imaginary part are sent separately.
        if jnp.iscomplexobj(flat):
            parts = (self.broadcast(part, axis, root) for part in (flat.real, flat.imag))
            return lax.complex(*parts)
        if jnp.issubdtype(flat.dtype, jnp.floating):
            return _broadcast_float(flat, axis, root)
        whole = flat.astype(jnp.uint8) if flat.dtype == jnp.bool_ else flat
        return _of_root(whole, axis, root).astype(flat.dtype)

    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        # XLA has no reduction to a root, so all devices get the sum. `operations.reduce` replaces
        # the sums of all devices except the root by zeros.
        return self.all_reduce(flat, axis, combine)

    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        return lax.all_to_all(blocks, axis, 0, 0)

    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        """Compute the cost of a ring in one direction, which sends the fewest bytes.

        XLA may run other steps. Broadcast and reduce have the cost of an all-reduce, because XLA
        runs both as all-reduces. The cost is too low in two cases. A reduce-scatter of max or min
        runs as an all-reduce too. Broadcast, max and min send each float of up to two bytes as four
        bytes.
        """
        once = kind in ("reduce_scatter", "all_gather", "all_to_all")
        steps = (1 if once else 2) * (size - 1)
        sent = steps * payload_bytes / size
        return Traffic(steps, sent, sent, 1)


def _scatter_rows(blocks: jax.Array, axis: Axis) -> jax.Array:
    """Reduce-scatter [N, c] -> [c], in rows that are as wide as a vector register.

    XLA:TPU replaces a reduce-scatter of other shapes by an all-reduce, which sends twice the bytes.
    """
    count, width = blocks.shape
    padded = jnp.pad(blocks, ((0, 0), (0, -width % LANES)))
    return lax.psum_scatter(padded.reshape(count, -1, LANES), axis).reshape(-1)[:width]
