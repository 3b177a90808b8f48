"""Rotary positions (Su et al. 2021, arXiv 2104.09864).

Dims: B batch, L sequence, H heads, d head_dim.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, PositiveFloat

from jaxdist.config.schema import Config, Count

MOST_ANGLES = 2**18
"""The largest number of rotary angles whose sines and cosines a program holds as constants."""


class LinearScaling(Config):
    """A scaling that divides positions by a factor."""

    type: Literal["linear"]
    """The name that selects this scaling in a config."""
    factor: PositiveFloat
    """The number by which positions are divided."""

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        """Return scaled frequencies for given frequencies, in radians per position."""
        return frequency / self.factor


class Llama3Scaling(Config):
    """A scaling of low frequencies by a factor, which fades out towards high frequencies."""

    type: Literal["llama3"]
    """The name that selects this scaling in a config."""
    factor: PositiveFloat
    """The number by which the frequencies of long waves are divided."""
    low_freq_factor: PositiveFloat
    """The limit of long waves: the frequencies of waves longer than original_length /
    low_freq_factor are divided."""
    high_freq_factor: PositiveFloat
    """The limit of short waves: waves shorter than original_length / high_freq_factor keep their
    frequencies."""
    original_length: Count
    """The length, in tokens, of the sequences on which the model was first trained."""

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        """Return scaled frequencies for given frequencies, in radians per position."""
        turns = self.original_length / (2 * math.pi / frequency)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


RopeScaling = Annotated[LinearScaling | Llama3Scaling, Field(discriminator="type")]


def frequencies(
    theta: float, head_dim: int, scaling: LinearScaling | Llama3Scaling | None = None
) -> np.ndarray:
    """Return the frequencies of the pairs of a head, float32 `[head_dim / 2]`, in radians.

    Published models were trained with frequencies that were rounded in the order of these
    operations. Another order changes a frequency's last bit, and the angle at position 500 by
    3e-5.

    Args:
      theta: the base of the frequencies: pair i has the frequency theta^(-2 i / head_dim).
      head_dim: the number of features of a head.
      scaling: the change of the frequencies for longer sequences, or None without a change.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # With AVX-512, numpy's power of float32 values has other bits in a sixth of the frequencies.
    power = (theta ** exponent.astype(np.float64)).astype(np.float32)
    frequency = 1.0 / power
    return frequency if scaling is None else scaling.scaled(frequency)


def rotate(
    x_BLHd: jax.Array,
    *,
    theta: float,
    scaling: LinearScaling | Llama3Scaling | None = None,
    by_product: bool = False,
    at: tuple[jax.Array, int] | None = None,
) -> jax.Array:
    """Rotate each pair of features, by an angle that grows with the position.

    A pair has one feature from each half of a head. Attention depends only on differences of
    positions, so the positions of a packed document need not start at 0.

    Args:
      theta: the base of the frequencies; see `frequencies`.
      scaling: the change of the frequencies for longer sequences, or None without a change.
      by_product: whether to swap the halves by a product with a permutation, which is exact in
        bfloat16. On a TPU each half of a head fills half a tile, which is slow to cut and to join.
      at: the positions int32 `[B, L]` and a number that exceeds all positions, or None for the
        positions 0..L-1.
    """
    length, half = at[1] if at else x_BLHd.shape[1], x_BLHd.shape[-1] // 2
    # Angles are constants unless there are too many, because XLA would recompute an expression for
    # each row and head.
    xp = np if length * half <= MOST_ANGLES else jnp
    frequency = frequencies(theta, 2 * half, scaling)
    angle = xp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (jnp.asarray(f(angle)) for f in (xp.cos, xp.sin))
    # All angles come from this table, so the angle of a position has the same bits in any order.
    cos, sin = (x[at[0]] if at else x[None] for x in (cos, sin))
    cos, sin = cos[:, :, None], sin[:, :, None]
    wide = x_BLHd.astype(jnp.float32)
    if by_product and x_BLHd.dtype == jnp.bfloat16:
        cos, sin = (jnp.concatenate([x, x], axis=-1) for x in (cos, sin))
        return (wide * cos + _swapped(x_BLHd).astype(jnp.float32) * sin).astype(x_BLHd.dtype)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHd.dtype)


def _swapped(x_BLHd: jax.Array) -> jax.Array:
    """Exchange the halves of the last dim, and negate the half that is then the first."""
    half = x_BLHd.shape[-1] // 2
    permutation = np.eye(2 * half, k=half) - np.eye(2 * half, k=-half)
    # `x_BLHd` is not reshaped to a matrix: if an axis splits the heads, XLA would gather the heads
    # for the reshape.
    return jnp.tensordot(x_BLHd, jnp.asarray(permutation, x_BLHd.dtype), 1)
