"""The contract of error feedback: a memory of the sender, and a view of its messages' holders.

In each round the sender encodes `x`, which `correct` computes from its gradient and its memory,
decodes its own message, and calls `settle`. A holder computes the value that replaces the gradient
from the decoded message and its view (`receive`). Where messages do not carry the gradient itself,
all devices keep common state of the results: `carried` computes the value to send from that state
and a gradient, and `conclude` computes the value that replaces the gradient from a result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jaxdist.compression.contract import Codec
from jaxdist.config.schema import Config
from jaxdist.errors import CompressionError
from jaxdist.types import Leaf

Memory: TypeAlias = Any
"""A sender's memory: a tree of float32 arrays shaped like its messages' content."""
View: TypeAlias = Any
"""Holders' state of a sender's messages, or of the sum of several senders' messages."""


class Feedback(Config):
    """A way to send later what a message left out; an instance is both the choice and the code."""

    def check(self, codec: Codec) -> None:
        """Raise CompressionError for a codec that this feedback does not improve."""
        if codec.lossless or (codec.contractive and not codec.unbiased):
            return
        why = "is unbiased: it has no error to feed back, and its variance would add up"
        if not codec.unbiased:
            why = "sends elements several times as large, and what is fed back would grow"
        raise CompressionError(
            f"{getattr(self, 'type', type(self).__name__)} feedback on {codec!r}, which {why}; "
            "leave the feedback out (error_feedback: false; in code NoFeedback()), or take a codec "
            "that is biased: rounding: nearest, scaled: false"
        )

    @property
    def back(self) -> Feedback:
        """Return the feedback of the device that encodes the sum again."""
        return self

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        """Prepare all gradients of a device together, before they are corrected one by one."""
        return list(gradients)

    @abstractmethod
    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory: ...

    def view(self, like: Leaf) -> View:
        """Return the holders' view before the first round."""
        return ()

    def common(self, like: Leaf) -> View:
        """Return the common state of the results, before the first round."""
        return ()

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        """Return a device's part of the value to send, of `devices` devices."""
        return gradient

    def conclude(self, value: jax.Array, common: View) -> tuple[jax.Array, View]:
        """Return the value that replaces the sum of gradients, and the next common state."""
        return value, common

    @abstractmethod
    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]: ...

    @abstractmethod
    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory: ...

    def receive(self, decoded: jax.Array, view: View) -> tuple[jax.Array, View]:
        """Return the value that replaces the gradient, and the next view."""
        return decoded, view
