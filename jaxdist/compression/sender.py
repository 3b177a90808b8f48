"""A codec with feedback between one sender and the holders of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxdist.collectives.algorithms.auto import here_kind
from jaxdist.compression.contract import Codec, CodecState, Message, Round
from jaxdist.compression.feedback.classic import CLASSIC
from jaxdist.compression.feedback.contract import Feedback, Memory, View
from jaxdist.errors import CompressionError
from jaxdist.types import Leaf, PyTree

T = TypeVar("T")


class SenderState(NamedTuple):
    """The state of a sender.

    Attributes:
      codec: the codec's state.
      memory: the feedback's memory.
      skipped: number of rounds that held a NaN or an infinity, an int32 scalar.
    """

    codec: CodecState
    memory: Memory
    skipped: jax.Array


class EncodedGradient(NamedTuple):
    """The results of encoding a gradient.

    Attributes:
      message: the message for the holders; undefined where not `finite`.
      decoded: the value that they decode from it, float32.
      state: the next state; where not `finite` the old state, with one more skipped round.
      finite: whether gradient and message hold no NaN and no infinity, a bool scalar.
    """

    message: Message
    decoded: jax.Array
    state: SenderState
    finite: jax.Array


@dataclass(frozen=True)
class Sender:
    """Error feedback around a codec: for messages to a server, or between slow rounds.

    >>> from jaxdist.compression import Sign, first_round
    >>> sender, x = Sender(Sign()), jnp.asarray([3.0, -1.0])
    >>> sent = sender.encode(x, sender.init(x), first_round())
    >>> sent.decoded.tolist(), sent.state.memory["residual"].tolist()
    ([2.0, -2.0], [1.0, 1.0])

    Raises:
      CompressionError: feedback that does not fit the codec.
    """

    codec: Codec
    feedback: Feedback = CLASSIC

    def __post_init__(self) -> None:
        self.feedback.check(self.codec)
        if jax.tree.leaves(jax.eval_shape(self.feedback.common, jax.ShapeDtypeStruct((1,), "f4"))):
            raise CompressionError(
                f"feedback {self.feedback!r} needs what all senders have in common: take classic, "
                "ef21 or momentum for one sender"
            )

    def init(self, like: Leaf) -> SenderState:
        """Return the state before the first round.

        Raises:
          CompressionError: the codec cannot encode such an array.
        """
        self.codec.check(like)
        memory = self.feedback.init(like, [self.codec])
        return SenderState(self.codec.init(like), memory, jnp.int32(0))

    def encode(self, gradient: jax.Array, state: SenderState, round: Round) -> EncodedGradient:
        """Encode the message of a round."""
        self.codec.check(gradient)
        (ready,) = self.feedback.prepare([gradient], 1)
        x, memory = self.feedback.correct(ready, state.memory)
        message, codec = encode_once(self.codec, x, state.codec, round)
        decoded = self.codec.decode(message, x, round)
        memory = self.feedback.settle(x, decoded, memory)
        finite = array_is_finite(gradient) & array_is_finite(decoded)
        after = SenderState(codec, memory, state.skipped)
        # A NaN in the residual would spoil every later round, so such a round keeps the old
        # memory.
        before = state._replace(skipped=state.skipped + 1)
        return EncodedGradient(message, decoded, select_tree(finite, after, before), finite)

    def receive(
        self, message: Message, view: View, like: Leaf, round: Round
    ) -> tuple[jax.Array, View]:
        """Return the value that replaces the gradient, float32, and the holder's next view.

        Args:
          view: `feedback.view(like)` before the first round.
        """
        return self.feedback.receive(self.codec.decode(message, like, round), view)


def encode_once(
    codec: Codec, x: jax.Array, state: CodecState, round: Round
) -> tuple[Message, CodecState]:
    """Call `codec.encode`, and keep XLA from recomputing the message with different rounding.

    The residual would then belong to another message than the message sent.
    """
    message, state = codec.encode(x, state, round)
    message = jax.lax.optimization_barrier(message)
    if here_kind() != "cpu":
        return message, state
    # XLA:CPU drops barriers before it fuses; a branch's result cannot be recomputed elsewhere.
    nothing: Message = jax.tree.map(jnp.zeros_like, message)
    return jax.lax.cond(round.step >= 0, lambda: message, lambda: nothing), state


def array_is_finite(x: jax.Array) -> jax.Array:
    """Return whether an array holds no NaN and no infinity, as a bool scalar."""
    return jnp.all(jnp.isfinite(x))


def select_tree(condition: jax.Array, yes: T, no: T) -> T:
    """Choose between two trees of arrays, by a bool scalar."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition, a, b)

    found: PyTree = jax.tree.map(pick, yes, no)
    return found
