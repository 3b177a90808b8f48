"""The clipping of each device's gradients before they are encoded."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from pydantic import PositiveFloat

from jaxdist.compression.feedback.contract import Feedback


class ClippedFeedback(Feedback):
    """A feedback for which each device clips its gradients."""

    clip_norm: PositiveFloat | None = None
    """The limit of the norm of the summed gradient; null does not clip. Each device clips its
    gradient to the limit divided by the square root of the number of devices. The optimizer cannot
    clip instead, since it receives a gradient with another norm."""

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        """Scale a device's gradients to a norm of at most clip_norm / sqrt(devices), in float32.

        The sum of `devices` independent gradients then has a norm of about `clip_norm` (Deep
        Gradient Compression, Lin et al., arXiv 1712.01887, section 3).
        """
        wide = [gradient.astype(jnp.float32) for gradient in gradients]
        if self.clip_norm is None:
            return wide
        square = sum((jnp.sum(x * x) for x in wide), start=jnp.float32(0))
        norm, most = jnp.sqrt(square), self.clip_norm / devices**0.5
        factor = jnp.where(norm > most, most / norm, 1.0)
        return [x * factor for x in wide]
