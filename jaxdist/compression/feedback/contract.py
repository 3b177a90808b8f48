"""What error feedback is: a memory of the sender, and a view of the holders of its messages.

In each round the sender encodes `x`, which `correct` makes of its gradient and its memory, decodes
its own message, and `settle`s. A holder makes of what it decoded, and of its view, the value that
stands for the gradient (`receive`). Where what is sent is not the gradient itself, all devices keep
something of the results in common: `carried` makes of it and of a gradient what is sent, and
`conclude` makes of a result what stands for the gradient.
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
"""What a sender keeps: a tree of float32 arrays like what it sends."""
View: TypeAlias = Any
"""What holders keep of a sender's messages, or of the sum of several senders'."""


class Feedback(Config):
    """A way to send later what a message left out; an instance is both the choice and the code."""

    def check(self, codec: Codec) -> None:
        """Raises CompressionError for a codec that this feedback makes no better."""
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
        """The feedback of who encodes the sum again."""
        return self

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        """All gradients of a device at once, before they are corrected one by one."""
        return list(gradients)

    @abstractmethod
    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory: ...

    def view(self, like: Leaf) -> View:
        """The holders' view before the first round."""
        return ()

    def common(self, like: Leaf) -> View:
        """What all devices keep alike of the results, before the first round."""
        return ()

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        """A device's part of what is sent, of so many devices."""
        return gradient

    def conclude(self, value: jax.Array, common: View) -> tuple[jax.Array, View]:
        """What stands for the sum of gradients, and what all keep of it."""
        return value, common

    @abstractmethod
    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]: ...

    @abstractmethod
    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory: ...

    def receive(self, decoded: jax.Array, view: View) -> tuple[jax.Array, View]:
        """What stands for the gradient, and the next view."""
        return decoded, view
