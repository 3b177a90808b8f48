"""The clipping of each device's gradients before they are encoded."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def clip_own(gradients: Sequence[jax.Array], limit: float | None, devices: int) -> list[jax.Array]:
    """Scale a device's gradients such that their norm is at most limit / sqrt(devices), in float32.

    The sum of `devices` independent gradients then has a norm of about `limit` (Deep Gradient
    Compression, Lin et al., arXiv 1712.01887, section 3). If `limit` is None, the gradients are
    only converted to float32.
    """
    wide = [gradient.astype(jnp.float32) for gradient in gradients]
    if limit is None:
        return wide
    square = sum((jnp.sum(x * x) for x in wide), start=jnp.float32(0))
    norm, most = jnp.sqrt(square), limit / devices**0.5
    factor = jnp.where(norm > most, most / norm, 1.0)
    return [x * factor for x in wide]
