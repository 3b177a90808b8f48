"""A codec with error feedback for a single sender, and functions that all senders use."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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
K = TypeVar("K", bound=Hashable)


class SenderState(NamedTuple):
    """The state of a `Sender` between rounds.

    Attributes:
      codec: the codec's state.
      memory: the feedback's memory.
      skipped: the number of rounds that were skipped because of a NaN or an infinity, an int32
        scalar.
    """

    codec: CodecState
    memory: Memory
    skipped: jax.Array


class EncodedGradient(NamedTuple):
    """An encoded gradient, with the next state of its sender.

    Attributes:
      message: the message for the receivers, which must not be sent if `finite` is false.
      decoded: the float32 value that the receivers decode from the message.
      state: the next state. If `finite` is false, this is the old state with one more skipped
        round.
      finite: whether the gradient and the decoded message are finite, a bool scalar.
    """

    message: Message
    decoded: jax.Array
    state: SenderState
    finite: jax.Array


@dataclass(frozen=True)
class Sender:
    """A codec with error feedback for a single sender, such as a worker of a parameter server.

    Attributes:
      codec: the codec of the sender's messages.
      feedback: the error feedback.

    >>> from jaxdist.compression import Sign, first_round
    >>> sender, x = Sender(Sign()), jnp.asarray([3.0, -1.0])
    >>> sent = sender.encode(x, sender.init(x), first_round())
    >>> sent.decoded.tolist(), sent.state.memory["residual"].tolist()
    ([2.0, -2.0], [1.0, 1.0])

    Raises:
      CompressionError: the feedback does not fit the codec, or needs a common state of all senders.
    """

    codec: Codec
    feedback: Feedback = CLASSIC

    def __post_init__(self) -> None:
        self.feedback.check(self.codec)
        if jax.tree.leaves(jax.eval_shape(self.feedback.common, jax.ShapeDtypeStruct((1,), "f4"))):
            raise CompressionError(
                f"feedback {self.feedback!r} needs a state that all senders share, but these "
                "senders share no state: use classic, ef21 or momentum"
            )

    def init(self, like: Leaf) -> SenderState:
        """Return the state before the first round.

        Raises:
          CompressionError: the codec cannot encode an array like `like`.
        """
        self.codec.check(like)
        memory = self.feedback.init(like, [self.codec])
        return SenderState(self.codec.init(like), memory, jnp.int32(0))

    def encode(self, gradient: jax.Array, state: SenderState, round: Round) -> EncodedGradient:
        """Encode the gradient of a round as a message, and compute the next state.

        Args:
          gradient: the gradient to send.
          state: the state after the previous round.
          round: the round in which the message is sent.
        """
        self.codec.check(gradient)
        (ready,) = self.feedback.prepare([gradient], 1)
        x, memory = self.feedback.correct(ready, state.memory)
        message, codec = encode_once(self.codec, x, state.codec, round)
        decoded = self.codec.decode(message, x, round)
        memory = self.feedback.settle(x, decoded, memory)
        finite = array_is_finite(gradient) & array_is_finite(decoded)
        after = SenderState(codec, memory, state.skipped)
        # A NaN in the residual would be in every later message. A round with a NaN therefore keeps
        # the old memory.
        before = state._replace(skipped=state.skipped + 1)
        return EncodedGradient(message, decoded, select_tree(finite, after, before), finite)

    def receive(
        self, message: Message, view: View, like: Leaf, round: Round
    ) -> tuple[jax.Array, View]:
        """Decode a message, and return the value that replaces the gradient, and the next `view`.

        Args:
          message: the message of the sender.
          view: the state of the receiver, which is `feedback.view(like)` before the first round.
          like: the shape and dtype of the gradient.
          round: the round of the message.
        """
        return self.feedback.receive(self.codec.decode(message, like, round), view)


def states_after_push(
    before: Mapping[K, SenderState], sent: Mapping[K, EncodedGradient], *, finite: bool
) -> dict[K, SenderState]:
    """Return the next sender states of the arrays of a push, by key.

    If one array of a push is not finite, no array of the push is sent. All arrays then keep their
    old states, with one more skipped round.

    Args:
      before: the states before the push, by key.
      sent: the encoded arrays, by key.
      finite: whether all arrays of the push are finite, including arrays that are not encoded.
    """
    if finite:
        return {key: one.state for key, one in sent.items()}
    return {key: before[key]._replace(skipped=before[key].skipped + 1) for key in sent}


def encode_once(
    codec: Codec, x: jax.Array, state: CodecState, round: Round
) -> tuple[Message, CodecState]:
    """Return the result of `codec.encode` such that XLA computes the message only once.

    XLA could compute the message a second time for the residual, with different rounding. The
    residual would then be wrong for the sent message.
    """
    message, state = codec.encode(x, state, round)
    message = jax.lax.optimization_barrier(message)
    if here_kind() != "cpu":
        return message, state
    # XLA:CPU removes barriers before it fuses, but it cannot compute the result of a branch twice.
    # The condition is always true, but XLA cannot prove this.
    nothing: Message = jax.tree.map(jnp.zeros_like, message)
    return jax.lax.cond(round.step >= 0, lambda: message, lambda: nothing), state


def array_is_finite(x: jax.Array) -> jax.Array:
    """Return whether all elements of an array are finite, as a bool scalar."""
    return jnp.all(jnp.isfinite(x))


def select_tree(condition: jax.Array, yes: T, no: T) -> T:
    """Return the tree `yes` if the bool scalar `condition` is true, otherwise the tree `no`."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition, a, b)

    found: PyTree = jax.tree.map(pick, yes, no)
    return found
