"""The contract of error feedback: a memory of each sender, and a view of each receiver.

In each round the sender computes `x` from its gradient and its memory (`correct`), encodes it,
decodes its own message, and updates its memory (`settle`). From the decoded message and its view, a
receiver computes the value that replaces the gradient (`receive`). Where messages carry something
other than the gradient, such as momentum, all devices keep equal copies of a state: `carried`
computes the value to send from that state and a gradient, and `conclude` computes the value that
replaces the gradient from a result.
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
"""A sender's memory: a tree of float32 arrays with the shape of the arrays that it encodes."""
View: TypeAlias = Any
"""A receiver's state for a sender's messages, or for the sum of several senders' messages."""


class Feedback(Config):
    """A method of sending a message's error later; an instance is its settings and its code."""

    def check(self, codec: Codec) -> None:
        """Raise CompressionError for a codec whose estimates this feedback would make worse."""
        if codec.lossless or (codec.contractive and not codec.unbiased):
            return
        why = "is unbiased: it has no error to feed back, and feedback would add up its variance"
        if not codec.unbiased:
            why = "scales up the elements that it sends, so that the error fed back would grow"
        raise CompressionError(
            f"{getattr(self, 'type', type(self).__name__)} feedback on {codec!r}, which {why}; "
            "leave the feedback out (error_feedback: false; in code NoFeedback()), or use a "
            "biased codec (rounding: nearest, scaled: false)"
        )

    @property
    def back(self) -> Feedback:
        """The feedback of a device that encodes the sum of its shard again."""
        return self

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        """Prepare all gradients of a device together, such as by clipping, before `correct`."""
        return list(gradients)

    @abstractmethod
    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory: ...

    def view(self, like: Leaf) -> View:
        """Return a receiver's view before the first round."""
        return ()

    def common(self, like: Leaf) -> View:
        """Return the common state of the results before the first round."""
        return ()

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        """Return this device's term of the sum over `devices` devices that messages carry."""
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
