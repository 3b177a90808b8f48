"""Messages of momentum in place of gradients, as 1-bit Adam and 1-bit LAMB send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat

from jaxdist.compression.feedback.classic import ErrorFeedback, Residual
from jaxdist.compression.feedback.clipping import clip_own
from jaxdist.compression.feedback.contract import Feedback, View
from jaxdist.types import Leaf


class CompressedMomentum(Residual):
    """The communication of 1-bit Adam (Tang et al., arXiv 2102.02888) and 1-bit LAMB (2104.06069).

    Each of N devices sends its part of the next momentum, (b1 / N) m + (1 - b1) gradient, plus the
    residual of its earlier messages; m is the last momentum, the same on all devices. The sum m' of
    these parts is returned in the form of a gradient, (m' - b1 m) / (1 - b1), from which an
    optimizer with the same b1 recovers m'. With lossless messages the result is the sum of the
    gradients. Lossy messages make the result several times as large, so this feedback suits only
    optimizers that use gradients for nothing but their momentum.

    Memory: as classic, plus 4 bytes for each element of m.
    """

    type: Literal["compressed_momentum"] = "compressed_momentum"
    """Selects this feedback."""
    b1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Decay of the momentum; it must equal the optimizer's b1."""
    clip_norm: PositiveFloat | None = None
    """Limit of the norm of the summed gradient, to which each device clips its own share before it
    sends; null never clips. The optimizer cannot clip instead, since it receives a reconstructed
    gradient with another norm."""

    @property
    def back(self) -> Feedback:
        return ErrorFeedback(rounded=self.rounded)

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        return clip_own(gradients, self.clip_norm, devices)

    def common(self, like: Leaf) -> View:
        return {"momentum": jnp.zeros(like.shape, jnp.float32)}

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        gradient = gradient.astype(jnp.float32)
        return (self.b1 / devices) * common["momentum"] + (1 - self.b1) * gradient

    def conclude(self, value: jax.Array, common: View) -> tuple[jax.Array, View]:
        gradient = (value - self.b1 * common["momentum"]) / (1 - self.b1)
        return gradient, {"momentum": value}
