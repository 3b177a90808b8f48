"""Rotary positions (Su et al. 2021, arXiv 2104.09864).

Dims: B batch, L sequence, H heads, d head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MOST_ANGLES = 2**18
"""The most rotary angles (sine and cosine, float32) that a program holds as constants."""


def rotate(x_BLHd: jax.Array, *, theta: float, by_product: bool = False) -> jax.Array:
    """Rotate pairs of features, from the two halves of a head; positions are 0..L-1.

    Attention depends only on differences of positions, so packed documents need no restart.

    Args:
      by_product: swap the halves by a product with a permutation, exact in bfloat16. This is for
        TPUs, where each half of a head fills half a tile, which is slow to cut and to join.
    """
    length, half = x_BLHd.shape[1], x_BLHd.shape[-1] // 2
    # In an expression, XLA would recompute the angles for each row and head; constants are only
    # read.
    xp = np if length * half <= MOST_ANGLES else jnp
    frequency = theta ** (-xp.arange(half, dtype=jnp.float32) / half)
    angle = xp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (jnp.asarray(f(angle))[None, :, None, :] for f in (xp.cos, xp.sin))
    wide = x_BLHd.astype(jnp.float32)
    if by_product and x_BLHd.dtype == jnp.bfloat16:
        cos, sin = (jnp.concatenate([x, x], axis=-1) for x in (cos, sin))
        return (wide * cos + _swapped(x_BLHd).astype(jnp.float32) * sin).astype(x_BLHd.dtype)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHd.dtype)


def _swapped(x_BLHd: jax.Array) -> jax.Array:
    """Return (-second, first) for an array of (first, second) halves."""
    half = x_BLHd.shape[-1] // 2
    permutation = np.eye(2 * half, k=half) - np.eye(2 * half, k=-half)
    # Rows are not flattened: where an axis splits the heads, flattening would make XLA gather them.
    return jnp.tensordot(x_BLHd, jnp.asarray(permutation, x_BLHd.dtype), 1)
