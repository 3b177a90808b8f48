"""Bits in messages: floats as words, blocks with scales of two bytes, planes of bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

LEAST_SCALE = 2.0**-126
"""The smallest normal float32: many devices flush smaller numbers to zero."""
BITS = 8
"""Bits in a byte."""


def to_words(x: jax.Array) -> jax.Array:
    """Convert floats to unsigned integers of the same width.

    >>> to_words(jnp.float32(1)).dtype
    dtype('uint32')
    """
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_words(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Invert `to_words`."""
    return lax.bitcast_convert_type(words, dtype)


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Convert any shape to float32 [ceil(n / block), block], with zeros at the end."""
    flat = x.reshape(-1).astype(jnp.float32)
    padding = -flat.size % block
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(-1, block)


def out_of_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `in_blocks`, for blocks of any form."""
    size = 1
    for length in shape:
        size *= length
    return blocks.reshape(-1)[:size].reshape(shape)


def block_sizes(size: int, block: int) -> jax.Array:
    """Return the number of elements of each block, without padding, as float32 [blocks]."""
    starts = jnp.arange(-(-size // block), dtype=jnp.float32) * block
    return jnp.minimum(size - starts, block)


def coarse(scale: jax.Array, *, up: bool) -> jax.Array:
    """Round scales to eight significant bits, float32, so that products with small codes are exact.

    Args:
      scale: a number that is not negative.
      up: round up; otherwise to nearest.
    """
    if up:
        bits = (to_words(scale) + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
        rounded = jnp.where(jnp.isfinite(scale), from_words(bits, jnp.float32), scale)
    else:
        rounded = scale.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(scale < LEAST_SCALE, 0.0, rounded)


def scale_words(scale: jax.Array) -> jax.Array:
    """Convert `coarse` scales to uint16."""
    return to_words(scale.astype(jnp.bfloat16))


def scales_of(words: jax.Array) -> jax.Array:
    """Invert `scale_words`, as float32."""
    return from_words(words, jnp.bfloat16).astype(jnp.float32)


def power_of_two(limit: jax.Array) -> jax.Array:
    """Return the largest power of two that is not above `limit`, float32; within normal numbers.

    >>> power_of_two(jnp.float32(5.0)).item()
    4.0
    """
    exponent = jnp.clip((to_words(limit) >> 23).astype(jnp.int32) & 0xFF, 1, 253)
    return from_words(exponent.astype(jnp.uint32) << 23, jnp.float32)


def pack_rows(rows: jax.Array, bits: int) -> jax.Array:
    """Pack codes of `bits` bits, uint32 [..., 8 / bits, c], to bytes [..., c]; row 0 is the lowest.

    Rows, not neighbours, share a byte, so that whole vectors are shifted and joined.
    """
    packed = rows[..., 0, :]
    for row in range(1, BITS // bits):
        packed = packed | (rows[..., row, :] << (row * bits))
    return packed.astype(jnp.uint8)


def unpack_rows(packed: jax.Array, bits: int) -> jax.Array:
    """Invert `pack_rows`, as uint8."""
    shifts = jnp.arange(BITS // bits, dtype=jnp.uint8) * jnp.uint8(bits)
    shape = (1,) * (packed.ndim - 1) + (BITS // bits, 1)
    return (packed[..., None, :] >> shifts.reshape(shape)) & jnp.uint8(2**bits - 1)
