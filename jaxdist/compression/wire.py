"""Conversions between arrays and the parts of messages: words, blocks, scales and packed codes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

LEAST_SCALE = 2.0**-126
"""The smallest normal float32, below which many devices flush numbers to zero."""
BITS = 8
"""The number of bits in a byte."""


def to_words(x: jax.Array) -> jax.Array:
    """Convert floats to unsigned integers of the same width.

    >>> to_words(jnp.float32(1)).dtype
    dtype('uint32')
    """
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_words(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Convert unsigned integers to floats of the same width: the inverse of `to_words`."""
    return lax.bitcast_convert_type(words, dtype)


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Reshape n elements to float32 blocks [ceil(n / block), block], padded with zeros."""
    flat = x.reshape(-1).astype(jnp.float32)
    padding = -flat.size % block
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(-1, block)


def out_of_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshape blocks to an array of shape `shape`, without the padding of `in_blocks`."""
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)


def block_sizes(size: int, block: int) -> jax.Array:
    """Return the number of elements of each block, without padding, as float32 [blocks]."""
    starts = jnp.arange(-(-size // block), dtype=jnp.float32) * block
    return jnp.minimum(size - starts, block)


def coarse(scale: jax.Array, *, up: bool) -> jax.Array:
    """Round float32 scales to eight significant bits, so that products with small codes are exact.

    A scale below `LEAST_SCALE` becomes 0, and a scale that is not finite is unchanged.

    Args:
      scale: the scales, which are not negative.
      up: whether to round up instead of to nearest.
    """
    # If a scale is rounded up, the quotient of an element and its scale is in the range of codes.
    if up:
        bits = (to_words(scale) + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
        rounded = jnp.where(jnp.isfinite(scale), from_words(bits, jnp.float32), scale)
    else:
        rounded = scale.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(scale < LEAST_SCALE, 0.0, rounded)


def scale_words(scale: jax.Array) -> jax.Array:
    """Convert scales that `coarse` returned to uint16 words."""
    # The cast is exact, because `coarse` rounds to eight significant bits, like bfloat16.
    return to_words(scale.astype(jnp.bfloat16))


def scales_of(words: jax.Array) -> jax.Array:
    """Convert uint16 words to float32 scales: the inverse of `scale_words`."""
    return from_words(words, jnp.bfloat16).astype(jnp.float32)


def power_of_two(limit: jax.Array) -> jax.Array:
    """Return the largest power of two that is at most `limit`, clipped to 2^-126 and 2^126.

    >>> power_of_two(jnp.float32(5.0)).item()
    4.0
    """
    # The largest biased exponent is 253, so that the inverse of the result is a normal number too.
    exponent = jnp.clip((to_words(limit) >> 23).astype(jnp.int32) & 0xFF, 1, 253)
    return from_words(exponent.astype(jnp.uint32) << 23, jnp.float32)


def pack_rows(rows: jax.Array, bits: int) -> jax.Array:
    """Pack uint32 codes [..., 8 / bits, c] of `bits` bits each into bytes [..., c].

    The codes of a column share a byte, with row 0 in the lowest bits. Whole rows can therefore be
    shifted and joined.
    """
    packed = rows[..., 0, :]
    for row in range(1, BITS // bits):
        packed = packed | (rows[..., row, :] << (row * bits))
    return packed.astype(jnp.uint8)


def unpack_rows(packed: jax.Array, bits: int) -> jax.Array:
    """Unpack bytes [..., c] to uint8 codes [..., 8 / bits, c]: the inverse of `pack_rows`."""
    shifts = jnp.arange(BITS // bits, dtype=jnp.uint8) * jnp.uint8(bits)
    shape = (1,) * (packed.ndim - 1) + (BITS // bits, 1)
    return (packed[..., None, :] >> shifts.reshape(shape)) & jnp.uint8(2**bits - 1)
