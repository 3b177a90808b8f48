"""Classic error feedback: what a message leaves out is added to the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class Residual(Feedback):
    """The residual r = x - decode(encode(x)) that x = gradient + r leaves for the next step.

    The law holds to the bit: `decode(encode(x)) + residual == x`. Where an estimate may be far from
    a small x (`Codec.exact` is false), no single float32 can hold that difference: the residual is
    then a sum of two, the rounded difference and its rounding error (Møller's and Knuth's two-sum).

    Memory: 4 bytes for each element; 8 for inexact codecs, unless `rounded`.
    """

    rounded: bool = False
    """Always keep one float32 value: the law then holds up to 2^-24 of the estimate."""

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
        # Two-sum of x and -decoded: residual + rounding is their exact difference.
        part = residual - x
        rounding = (x - (residual - part)) - (decoded + part)
        return {"residual": residual, "rounding": rounding}


class ErrorFeedback(Residual):
    """Error feedback: add the residual of each gradient to the next (Seide et al., 2014).

    See `Residual` for its law and memory.
    """

    type: Literal["classic"] = "classic"
    """Selects this feedback."""


CLASSIC = ErrorFeedback()
"""The default feedback."""
