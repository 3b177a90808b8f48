"""The classic error feedback, which adds the error of a message to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class Residual(Feedback):
    """The base class of feedback that encodes the sum of a gradient and a residual.

    A device encodes x = gradient + residual. The next residual is x - decode(encode(x)), and
    `decode(encode(x)) + residual` equals x exactly. If an estimate may be far from a small x
    (`Codec.exact` is false), a single float32 cannot represent the difference. The residual is then
    the sum of two float32 numbers: the rounded difference and its rounding error (two-sum of Møller
    and Knuth).

    Memory: 4 bytes for each element, or 8 bytes for codecs that are not exact, unless `rounded` is
    true.
    """

    rounded: bool = False
    """Whether the residual is a single float32 for every codec. If the codec is not exact, the
    residual then has an error of up to 2^-24 of the estimate."""

    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory:
        zero = jnp.zeros(like.shape, jnp.float32)
        if self.rounded or all(codec.exact for codec in codecs):
            return {"residual": zero}
        return {"residual": zero, "rounding": zero}

    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        x = gradient.astype(jnp.float32) + memory["residual"]
        return (x + memory["rounding"] if "rounding" in memory else x), memory

    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory:
        residual = x - decoded
        if "rounding" not in memory:
            return {"residual": residual}
        # The lines below compute the two-sum of x and -decoded: residual + rounding is exactly x -
        # decoded. A simpler order of these operations would lose the rounding error.
        part = residual - x
        rounding = (x - (residual - part)) - (decoded + part)
        return {"residual": residual, "rounding": rounding}


class ErrorFeedback(Residual):
    """The classic feedback (Seide et al., 2014): a `Residual` whose messages contain gradients."""

    type: Literal["classic"] = "classic"
    """The name that selects this feedback in a config."""


CLASSIC = ErrorFeedback()
"""The error feedback that is used by default."""
