"""The three exchanges, which combine the messages of all devices for a single bucket."""

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
"""Number of messages that are decoded and added in a single pass over the sum."""
PIECE_BYTES = 2**19
"""Bytes of the largest piece that a device sends in an all-to-all over gloo. Larger pieces contend
for the links, and each of many small pieces costs a latency."""


@dataclass(frozen=True)
class ExchangeContext:
    """The settings of an exchange between devices.

    Attributes:
      axis: mesh axis of the devices that take part.
      algorithm: algorithm of the collectives.
      feedback: the error feedback of every sender.
      round: the current round, with the rank of this device.
    """

    axis: Axis
    algorithm: Algorithm
    feedback: Feedback
    round: Round

    def part(self, index: int) -> ExchangeContext:
        """Return the settings for message `index` of several in a round."""
        return replace(self, round=self.round.part(index))

    def without_feedback(self) -> ExchangeContext:
        """Return the settings for a lossless codec."""
        return replace(self, feedback=NoFeedback())


class BucketState(NamedTuple):
    """The state that a device keeps for a bucket between rounds.

    Attributes:
      up: the feedback's memory for the messages that this device sends, shaped like the bucket.
      up_view: the view of all devices' messages; if shards are summed, of this device's shard only.
      down: the feedback's memory for the messages in which this device sends its shard's sum.
      down_view: the view of the messages with the sums of all shards, shaped like the bucket.
      common: the state of the results, which is the same on all devices.
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
        """Return the state before the first round, for a bucket of this shape."""
        up, common = feedback.init(like, codecs), feedback.common(like)
        if not in_shards:
            return cls(up, feedback.view(like), common=common)
        back = feedback.back
        shard = jax.ShapeDtypeStruct((-(-like.shape[0] // devices),), jnp.float32)
        views = feedback.view(shard), back.init(shard, codecs), back.view(like)
        return cls(up, *views, common)


Exchanged: TypeAlias = tuple[jax.Array, CodecState, BucketState]
"""A tuple of the result, which has the bucket's shape, the codec's next state and the bucket's next
state."""


def scatter_decoded(
    codec: Codec, gradient: jax.Array, held: CodecState, state: BucketState, party: ExchangeContext
) -> Exchanged:
    """Sum one shard of the bucket on each device, encode each sum again, and gather the sums."""
    feedback, back, round = party.feedback, party.feedback.back, party.round
    count, mine = axis_size(party.axis), rank(party.axis)
    x, up = feedback.correct(feedback.carried(gradient, state.common, count), state.up)
    shards = split_padded(x, count)
    numbers = jnp.arange(count, dtype=jnp.int32)

    # The second message of a device takes another rank: random numbers of the device's own are then
    # different in both messages, while numbers that all devices share (randomk's positions) are
    # equal.
    down_round = round._replace(rank=count + mine)

    def real(shard: jax.Array) -> jax.Array:
        """Set a shard's sum to zero in the padding beyond the bucket.

        The sign codec cannot represent zero, so the residual of the padding would grow and distort
        the scale of its block.
        """
        if shards.size == x.size:
            return shard
        return jnp.where(jnp.arange(shard.size) < x.size - mine * shard.size, shard, 0.0)

    def encode(shard: jax.Array, number: jax.Array, round: Round) -> Message:
        return encode_once(codec, shard, (), round.part(number))[0]

    def decode(message: Message, number: jax.Array) -> jax.Array:
        return codec.decode(message, shards[0], round.part(number))

    messages = jax.vmap(encode, in_axes=(0, 0, None))(shards, numbers, round)
    # The sender decodes its own messages, since the residual is the part that the receivers lack.
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
    """Gather the messages of all devices, and decode and sum them on every device."""
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
    """Sum the messages of a linear codec for all buckets, with one all-reduce for each round."""
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
    """Add up the estimates of stacked messages in order, `UNROLL` in each pass over the sum."""

    def add(total: jax.Array, message: Message) -> tuple[jax.Array, None]:
        return codec.add(total, message, like, round), None

    # Decoding all messages first would need as many float32 arrays as there are devices.
    return jax.lax.scan(add, jnp.zeros_like(like), messages, unroll=UNROLL)[0]


def _gathered(message: Message, party: ExchangeContext) -> Message:
    """Gather every device's message, stacked in the order of the axis."""
    return _each(message, lambda m: all_gather(m[None], party.axis, algorithm=party.algorithm))


def _exchanged(x: jax.Array, party: ExchangeContext) -> jax.Array:
    """Send row i of [N, ...] to device i, and return the N rows that arrive at this device.

    Over gloo the rows are sent in pieces: where large messages of several devices meet at one
    device, other connections are idle, and up to half of a slow link is unused.
    """
    pieces = -(-leaf_bytes(x) // PIECE_BYTES) if sends_apart() else 1
    if pieces == 1:
        return all_to_all(x, party.axis, algorithm=party.algorithm)
    flat = x.reshape(len(x), -1)
    parts = jnp.array_split(flat, pieces, axis=1)
    sent = [all_to_all(part, party.axis, algorithm=party.algorithm) for part in parts]
    return jnp.concatenate(sent, axis=1).reshape(x.shape)


def _each(message: Message, send: Callable[[jax.Array], jax.Array], lead: int = 0) -> Message:
    """Send every array of a message, joined as bytes if each collective costs its own latency.

    Args:
      send: function from [..., b] to [N, ..., b].
      lead: number of leading dims of each array that count messages.
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
    """Convert [*lead, ...] to uint8 [*lead, b]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:lead], -1)


def _from_bytes(part: jax.Array, dtype: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    """Convert uint8 [N, b] to [N, *shape]."""
    # A bitcast from uint8 removes the last dim, but not if the other dtype has one byte as well.
    width = (dtype.itemsize,) if dtype.itemsize > 1 else ()
    return jax.lax.bitcast_convert_type(part.reshape(len(part), *shape, *width), dtype)


def _joined(shards: jax.Array, size: int) -> jax.Array:
    return shards.reshape(-1)[:size]
