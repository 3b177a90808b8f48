"""The three exchanges, which combine the messages of all devices for the buckets of a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis, axis_size, rank
from jaxdist.collectives.bucket import reduce_tree, sends_apart
from jaxdist.collectives.contract import Algorithm, split_padded
from jaxdist.collectives.operations import all_gather, all_to_all
from jaxdist.compression.contract import Codec, CodecState, LinearCodec, Message, Round, in_lockstep
from jaxdist.compression.feedback.contract import Feedback, Memory, View
from jaxdist.compression.feedback.none import NoFeedback
from jaxdist.compression.sender import encode_once
from jaxdist.trees import leaf_bytes

UNROLL = 8
"""The number of messages that are decoded and added in a single pass over the sum."""
PIECE_BYTES = 2**19
"""The maximum number of bytes that a device sends in one all-to-all over gloo. Larger messages are
divided, because they contend for the links. Much smaller messages would cost latency."""


@dataclass(frozen=True)
class ExchangeContext:
    """The settings of an exchange between devices.

    Attributes:
      axis: the mesh axis, or the tuple of mesh axes, over which messages are sent.
      algorithm: the algorithm of the collectives.
      feedback: the error feedback of every sender.
      round: the current round, whose `rank` is the rank of this device.
    """

    axis: Axis
    algorithm: Algorithm
    feedback: Feedback
    round: Round

    def part(self, index: int) -> ExchangeContext:
        """Return the settings for the message with index `index` of the round."""
        return replace(self, round=self.round.part(index))

    def without_feedback(self) -> ExchangeContext:
        """Return the settings without error feedback, for a lossless codec."""
        return replace(self, feedback=NoFeedback())


class BucketState(NamedTuple):
    """The state that a device keeps for a bucket between rounds.

    With the exchange "scatter" a device sends two messages in a round: its gradient, and then the
    sum of its shard. `down` and `down_view` are for the second message, and are () with "gather"
    and "sum".

    Attributes:
      up: the feedback's memory for the messages with this device's gradients, with the shape of the
        bucket.
      up_view: the state of a receiver (`Feedback.view`) for the sum of all devices' messages. With
        "scatter" the state is for this device's shard of the sum only.
      down: the feedback's memory for the messages with the sums of this device's shard.
      down_view: the state of a receiver for the messages with the sums of all shards, with the
        shape of the bucket.
      common: the common state of the feedback, which is the same on all devices.
    """

    up: Memory = ()
    up_view: View = ()
    down: Memory = ()
    down_view: View = ()
    common: View = ()

    @classmethod
    def init(
        cls,
        like: jax.ShapeDtypeStruct,
        devices: int,
        codecs: Sequence[Codec],
        feedback: Feedback,
        *,
        in_shards: bool,
    ) -> BucketState:
        """Return the state before the first round.

        Args:
          like: the shape of the bucket.
          devices: the number of devices that exchange messages.
          codecs: the codecs of all stages.
          feedback: the error feedback.
          in_shards: whether a stage uses the exchange "scatter".
        """
        up, common = feedback.init(like, codecs), feedback.common(like)
        if not in_shards:
            return cls(up, feedback.view(like), common=common)
        back = feedback.back
        shard = jax.ShapeDtypeStruct((-(-like.shape[0] // devices),), jnp.float32)
        views = feedback.view(shard), back.init(shard, codecs), back.view(like)
        return cls(up, *views, common)


Exchanged: TypeAlias = tuple[jax.Array, CodecState, BucketState]
"""A tuple of the result in the shape of the bucket, the codec's next state, and the bucket's next
state."""


def scatter_decoded(
    codec: Codec, gradient: jax.Array, held: CodecState, state: BucketState, party: ExchangeContext
) -> Exchanged:
    """Exchange a bucket by "scatter".

    Each device decodes and sums the messages of its shard, and encodes the sum. The encoded sums
    are gathered on all devices.

    Args:
      codec: the codec of the bucket.
      gradient: this device's bucket.
      held: the state of the codec for this bucket.
      state: what the error feedback keeps for the bucket.
      party: the devices that exchange the bucket, and the settings of their exchange.
    """
    feedback, back, round = party.feedback, party.feedback.back, party.round
    count, mine = axis_size(party.axis), rank(party.axis)
    x, up = feedback.correct(feedback.carried(gradient, state.common, count), state.up)
    shards = split_padded(x, count)
    numbers = jnp.arange(count, dtype=jnp.int32)

    # A device encodes its second message as if it had another rank. Random numbers that depend on
    # the rank then differ between both messages. Random numbers that all devices share, such as the
    # positions of randomk, are the same in both messages.
    down_round = round._replace(rank=count + mine)

    def real(shard: jax.Array) -> jax.Array:
        """Return the sum of a shard with zeros in the padding after the end of the bucket.

        The sign codec cannot represent zero. Without this function, the residual of the padding
        would grow, and would distort the scale of the last block.
        """
        if shards.size == x.size:
            return shard
        return jnp.where(jnp.arange(shard.size) < x.size - mine * shard.size, shard, 0.0)

    def encode(shard: jax.Array, number: jax.Array, round: Round) -> Message:
        return encode_once(codec, shard, (), round.part(number))[0]

    def decode(message: Message, number: jax.Array) -> jax.Array:
        return codec.decode(message, shards[0], round.part(number))

    messages = jax.vmap(encode, in_axes=(0, 0, None))(shards, numbers, round)
    # The sender decodes its own messages, since the residual is the difference between its gradient
    # and the decoded messages.
    up = feedback.settle(x, _joined(jax.vmap(decode)(messages, numbers), x.size), up)

    # Each device sends its message of shard i to device i, and receives N messages of its shard.
    arrived = _each(messages, lambda m: _exchanged(m, party), 1)
    total = real(_summed(codec, arrived, shards[0], round.part(mine)))
    value, up_view = feedback.receive(total, state.up_view)

    y, down = back.correct(value, state.down)
    message = encode(y, mine, down_round)
    down = back.settle(y, real(decode(message, mine)), down)
    gathered = _gathered(message, party)
    result = _joined(jax.vmap(decode)(gathered, numbers), x.size)
    value, down_view = back.receive(result, state.down_view)
    value, common = feedback.conclude(value, state.common)
    return value, held, BucketState(up, up_view, down, down_view, common)


def gather_decoded(
    codec: Codec, gradient: jax.Array, held: CodecState, state: BucketState, party: ExchangeContext
) -> Exchanged:
    """Exchange a bucket by "gather": every device receives, decodes and sums all messages.

    The arguments are the arguments of `scatter_decoded`.
    """
    own = party.feedback.carried(gradient, state.common, axis_size(party.axis))
    x, up = party.feedback.correct(own, state.up)
    message, held = encode_once(codec, x, held, party.round)
    up = party.feedback.settle(x, codec.decode(message, x, party.round), up)
    total = _summed(codec, _gathered(message, party), x, party.round)
    value, view = party.feedback.receive(total, state.up_view)
    value, common = party.feedback.conclude(value, state.common)
    return value, held, BucketState(up, view, common=common)


def sum_up(
    codec: Codec,
    gradients: Sequence[jax.Array],
    held: Sequence[CodecState],
    states: Sequence[BucketState],
    party: ExchangeContext,
) -> list[Exchanged]:
    """Exchange all buckets of a group by "sum", with common all-reduces for all buckets.

    Args:
      codec: the codec, which must be a `LinearCodec`.
      gradients: this device's buckets.
      held: the state of the codec for each bucket.
      states: what the error feedback keeps for each bucket.
      party: the devices that exchange the buckets, and the settings of their exchange.
    """
    assert isinstance(codec, LinearCodec), codec
    feedback = party.feedback
    rounds = [party.round.part(i) for i in range(len(gradients))]
    count = axis_size(party.axis)
    corrected = [
        feedback.correct(feedback.carried(g, s.common, count), s.up)
        for g, s in zip(gradients, states, strict=True)
    ]
    xs = [x for x, _ in corrected]

    def total(parts: list[jax.Array]) -> list[jax.Array]:
        return reduce_tree(parts, party.axis, algorithm=party.algorithm)

    begun = [codec.factors(x, h, r) for x, h, r in zip(xs, held, rounds, strict=True)]
    found: list[Exchanged] = []
    for i, factored in enumerate(in_lockstep(begun, total)):
        own = codec.expand(factored.own, xs[i], rounds[i])
        up = feedback.settle(xs[i], own, corrected[i][1])
        result = codec.expand(factored.total, xs[i], rounds[i])
        value, view = feedback.receive(result, states[i].up_view)
        value, common = feedback.conclude(value, states[i].common)
        found.append((value, factored.state, BucketState(up, view, common=common)))
    return found


def _summed(codec: Codec, messages: Message, like: jax.Array, round: Round) -> jax.Array:
    """Return the sum of the estimates of stacked messages, which are added in order."""

    def add(total: jax.Array, message: Message) -> tuple[jax.Array, None]:
        return codec.add(total, message, like, round), None

    # Decoding all messages first would need as many float32 arrays as there are devices.
    return jax.lax.scan(add, jnp.zeros_like(like), messages, unroll=UNROLL)[0]


def _gathered(message: Message, party: ExchangeContext) -> Message:
    """Gather the messages of all devices, stacked along a new first dim by rank."""
    return _each(message, lambda m: all_gather(m[None], party.axis, algorithm=party.algorithm))


def _exchanged(x: jax.Array, party: ExchangeContext) -> jax.Array:
    """Send row i of [N, ...] to device i, and return the N rows that this device receives.

    Over gloo the rows are divided and sent by several all-to-alls. If several devices send large
    messages to the same device, other connections are idle, and up to half of a slow link is not
    used.
    """
    pieces = -(-leaf_bytes(x) // PIECE_BYTES) if sends_apart() else 1
    if pieces == 1:
        return all_to_all(x, party.axis, algorithm=party.algorithm)
    flat = x.reshape(len(x), -1)
    parts = jnp.array_split(flat, pieces, axis=1)
    sent = [all_to_all(part, party.axis, algorithm=party.algorithm) for part in parts]
    return jnp.concatenate(sent, axis=1).reshape(x.shape)


def _each(message: Message, send: Callable[[jax.Array], jax.Array], lead: int = 0) -> Message:
    """Send every array of a message, and return the arrays that this device receives.

    If XLA would send each array in a separate message (`sends_apart`), the arrays are first joined
    to a single array of bytes.

    Args:
      message: the message, or several stacked messages.
      send: the function that sends an array [..., b] and returns [N, ..., b].
      lead: the number of first dims of each array that count messages.
    """
    arrays, structure = jax.tree.flatten(message)
    if len(arrays) == 1 or not sends_apart():
        return structure.unflatten([send(x) for x in arrays])
    parts = [_to_bytes(x, lead) for x in arrays]
    arrived = send(jnp.concatenate(parts, axis=-1))
    ends = itertools.accumulate(part.shape[-1] for part in parts)
    found = [
        _from_bytes(arrived[..., end - part.shape[-1] : end], x.dtype, x.shape[lead:])
        for x, part, end in zip(arrays, parts, ends, strict=True)
    ]
    return structure.unflatten(found)


def _to_bytes(x: jax.Array, lead: int) -> jax.Array:
    """Convert an array [*lead, ...] to its bytes, uint8 [*lead, b]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:lead], -1)


def _from_bytes(part: jax.Array, dtype: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    """Convert N messages of bytes, uint8 [N, b], to arrays [N, *shape] of `dtype`."""
    # A bitcast from uint8 to a wider dtype removes the last dim. A bitcast to a dtype of one byte
    # does not.
    width = (dtype.itemsize,) if dtype.itemsize > 1 else ()
    return jax.lax.bitcast_convert_type(part.reshape(len(part), *shape, *width), dtype)


def _joined(shards: jax.Array, size: int) -> jax.Array:
    return shards.reshape(-1)[:size]
