"""The feedback of 1-bit Adam and 1-bit LAMB, whose messages have momentum instead of gradients."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxdist.compression.feedback.classic import ErrorFeedback, Residual
from jaxdist.compression.feedback.clipping import ClippedFeedback
from jaxdist.compression.feedback.contract import Feedback, View
from jaxdist.types import Leaf


class CompressedMomentum(ClippedFeedback, Residual):
    """The feedback of 1-bit Adam (Tang et al., arXiv 2102.02888) and 1-bit LAMB (2104.06069).

    Let m be the momentum of the previous round, which is the same on all N devices. Each device
    sends its summand of the next momentum, (b1 / N) m + (1 - b1) gradient, plus the residual of its
    earlier messages. The sum m' of all summands is the next momentum. The sum m' is converted to
    the form of a gradient, (m' - b1 m) / (1 - b1), from which an optimizer with the same b1
    computes m' again.

    With lossless messages, the result is the sum of the gradients. With lossy messages, the result
    is several times larger than the sum of the gradients. This feedback is therefore only for
    optimizers that use gradients for their momentum alone.

    Memory: the memory of classic feedback, and 4 bytes for each element of m.
    """

    type: Literal["compressed_momentum"] = "compressed_momentum"
    """The name that selects this feedback in a config."""
    b1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """The decay of the momentum, which must equal the b1 of the optimizer."""

    @property
    def back(self) -> Feedback:
        return ErrorFeedback(rounded=self.rounded)

    def common(self, like: Leaf) -> View:
        return {"momentum": jnp.zeros(like.shape, jnp.float32)}

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        gradient = gradient.astype(jnp.float32)
        return (self.b1 / devices) * common["momentum"] + (1 - self.b1) * gradient

    def conclude(self, value: jax.Array, common: View) -> tuple[jax.Array, View]:
        gradient = (value - self.b1 * common["momentum"]) / (1 - self.b1)
        return gradient, {"momentum": value}
