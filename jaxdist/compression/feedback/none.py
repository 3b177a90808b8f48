"""The absence of error feedback, for unbiased codecs and for measurements of feedback's effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory
from jaxdist.types import Leaf


class NoFeedback(Feedback):
    """The absence of feedback: the error of a message is lost."""

    type: Literal["none"] = "none"
    """The name that selects this feedback in a config."""

    def check(self, codec: Codec) -> None:
        pass

    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory:
        return ()

    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        return gradient.astype(jnp.float32), memory

    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory:
        return memory
