"""Classic error feedback: the error of a message is added to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class Residual(Feedback):
    """Feedback that adds a residual to the gradient, x = gradient + residual.

    The next residual is x - decode(encode(x)), so that `decode(encode(x)) + residual == x` holds to
    the bit. Where an estimate may be far from a small x (`Codec.exact` is false), no single float32
    can hold the difference. The residual is then the sum of two float32 numbers: the rounded
    difference and its rounding error (Møller's and Knuth's two-sum).

    Memory: 4 bytes for each element; 8 bytes for codecs that are not exact, unless `rounded`.
    """

    rounded: bool = False
    """Always keep the residual as a single float32, which has an error of up to 2^-24 of the
    estimate."""

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
        # A two-sum of x and -decoded: residual + rounding is their exact difference. A simpler
        # order of these operations would lose the rounding error, which is 0 only in exact
        # arithmetic.
        part = residual - x
        rounding = (x - (residual - part)) - (decoded + part)
        return {"residual": residual, "rounding": rounding}


class ErrorFeedback(Residual):
    """Classic feedback, which adds the residual of a gradient to the next (Seide et al., 2014).

    See `Residual` for the memory of this feedback.
    """

    type: Literal["classic"] = "classic"
    """Selects this feedback."""


CLASSIC = ErrorFeedback()
"""The feedback that is used by default."""
