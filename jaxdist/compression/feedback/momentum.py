"""The feedback with momentum correction, for codecs that send few elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.classic import ErrorFeedback
from jaxdist.compression.feedback.clipping import ClippedFeedback
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class MomentumCorrection(ClippedFeedback):
    """The feedback of Deep Gradient Compression (Lin et al., arXiv 1712.01887, algorithm 4).

    Each device has a velocity u = m u + gradient, and accumulates it in v = v + u. A message has
    the elements of v that the codec selects. The device then sets these elements of u to zero
    (factor masking), and keeps only the codec's error of these elements in v. The optimizer must
    have no momentum. Each device clips its gradient to `clip_norm` / sqrt(devices) before it
    computes the velocity (section 3).

    Memory: 8 bytes for each element.
    """

    type: Literal["momentum"] = "momentum"
    """The name that selects this feedback in a config."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """The decay of the velocity, m in the formula of `nesterov`."""
    nesterov: bool = False
    """Whether to use Nesterov's momentum: u = m (u + gradient), v = v + u + gradient."""
    masking: bool = True
    """Whether to set the velocity of sent elements to zero, so that old momentum has no further
    effect."""

    @property
    def back(self) -> Feedback:
        return ErrorFeedback()

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
            # An element is sent if its estimate is not zero, so an element that the codec rounded
            # to zero keeps its velocity.
            velocity = jnp.where(decoded != 0, 0.0, velocity)
        return {"velocity": velocity, "sum": x - decoded}
