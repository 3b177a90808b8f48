"""The base class of error feedback: senders keep a memory, and receivers keep a view.

In each round a sender computes an array `x` from its gradient and its memory (`correct`). The
sender encodes `x`, decodes the message, and computes its next memory (`settle`). From the decoded
message and its view, a receiver computes the value that replaces the gradient (`receive`).

If messages have something other than gradients, such as momentum, all devices keep a common state.
From this state and a gradient, `carried` computes the value to send. From this state and the
received sum, `conclude` computes the value that replaces the sum of gradients.
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
"""The memory of a sender: a tree of float32 arrays with the shape of the encoded arrays."""
View: TypeAlias = Any
"""The state of a receiver for the messages of a sender, or for the sum of several senders'
messages."""


class Feedback(Config):
    """The base class of error feedback, which sends the error of a message in later messages.

    A feedback is a config: an instance has the settings, and its methods are called in each round.
    """

    def check(self, codec: Codec) -> None:
        """Raise CompressionError if this feedback would make the estimates of a codec worse."""
        if codec.lossless or (codec.contractive and not codec.unbiased):
            return
        why = (
            "is unbiased, so error feedback has no bias to correct and would only add up the "
            "codec's variance"
        )
        if not codec.unbiased:
            why = (
                "scales up the elements that it sends, so the residual of error feedback would grow"
            )
        raise CompressionError(
            f"error feedback {getattr(self, 'type', type(self).__name__)} does not work with "
            f"{codec!r}: the codec {why}. Turn error feedback off (error_feedback: false, or "
            "NoFeedback() in code), or use a biased codec (rounding: nearest, scaled: false)"
        )

    @property
    def back(self) -> Feedback:
        """The feedback for the messages in which a device sends the sum of its shard."""
        return self

    def prepare(self, gradients: Sequence[jax.Array], devices: int) -> list[jax.Array]:
        """Return a device's gradients after a change, such as clipping, that precedes `correct`.

        Args:
          gradients: the gradients of this device.
          devices: the number of devices that exchange messages.
        """
        return list(gradients)

    @abstractmethod
    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory: ...

    def view(self, like: Leaf) -> View:
        """Return the initial state of a receiver for the messages of a sender."""
        return ()

    def common(self, like: Leaf) -> View:
        """Return the initial value of the state that is the same on all devices."""
        return ()

    def carried(self, gradient: jax.Array, common: View, devices: int) -> jax.Array:
        """Return the summand that this device encodes, from its gradient and the common state."""
        return gradient

    def conclude(self, value: jax.Array, common: View) -> tuple[jax.Array, View]:
        """Return the value that replaces the sum of gradients, and the next common state."""
        return value, common

    @abstractmethod
    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]: ...

    @abstractmethod
    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory: ...

    def receive(self, decoded: jax.Array, view: View) -> tuple[jax.Array, View]:
        """Return the value that replaces the gradient, and the receiver's next state (`view`)."""
        return decoded, view
