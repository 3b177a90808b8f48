"""Momentum correction: each sender keeps the momentum, for codecs that send few elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.classic import ErrorFeedback
from jaxdist.compression.feedback.clipping import clip_own
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class MomentumCorrection(Feedback):
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887, algorithm 4 and section 3).

    Each device has a velocity u = m u + gradient, which it accumulates in v = v + u. A message has
    the largest elements of v, after which the device sets these elements of u and v to zero (factor
    masking). The optimizer must not have a momentum of its own. Each device clips its gradient to
    `clip_norm` / sqrt(devices) before the gradients are added up.

    The codec's error in an element that is sent remains in v. Memory: 8 bytes for each element.
    """

    type: Literal["momentum"] = "momentum"
    """Selects this feedback."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay m of the velocity."""
    nesterov: bool = False
    """Use Nesterov's momentum: u = m (u + gradient), v = v + u + gradient."""
    clip_norm: PositiveFloat | None = None
    """Limit of the norm of the summed gradient, to which each device clips its own share; null
    never clips."""
    masking: bool = True
    """Set the velocity of the sent elements to zero, so that old momentum has no further effect."""

    @property
    def back(self) -> Feedback:
        return ErrorFeedback()

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        return clip_own(gradients, self.clip_norm, devices)

    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory:
        zero = jnp.zeros(like.shape, jnp.float32)
        return {"velocity": zero, "sum": zero}

    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        gradient = gradient.astype(jnp.float32)
        if self.nesterov:
            velocity = self.momentum * (memory["velocity"] + gradient)
            added = velocity + gradient
        else:
            velocity = self.momentum * memory["velocity"] + gradient
            added = velocity
        total = memory["sum"] + added
        return total, {"velocity": velocity, "sum": total}

    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory:
        velocity = memory["velocity"]
        if self.masking:
            # An element counts as sent if its estimate is not zero, so an element that the codec
            # rounded to zero keeps its velocity.
            velocity = jnp.where(decoded != 0, 0.0, velocity)
        return {"velocity": velocity, "sum": x - decoded}
