"""Messages without error feedback: for unbiased codecs, and to measure the effect of feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class NoFeedback(Feedback):
    """The absence of feedback: the part of a gradient that a message leaves out is lost."""

    type: Literal["none"] = "none"
    """Selects this feedback."""

    def check(self, codec: Codec) -> None:
        pass

    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory:
        return ()

    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        return gradient.astype(jnp.float32), memory

    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory:
        return memory
