"""The prediction of the time of a compressed all-reduce: its collectives, and its coding.

`collectives.cost` predicts the time of the collectives. The sizes of messages are static, so their
bytes are exact. The time of coding (encoding and decoding) is a number of passes over memory, at
the device's bytes per second. The prediction assumes that nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxdist.collectives.bucket import BUCKET_BYTES
from jaxdist.collectives.contract import Algorithm, Operation
from jaxdist.collectives.cost import Level
from jaxdist.collectives.cost import predict_seconds as collective_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.compression.choice import Choice, CodecGroup, plan_groups
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.contract import Codec, LinearCodec, first_round, in_lockstep
from jaxdist.compression.feedback.none import NoFeedback
from jaxdist.errors import JaxdistError, did_you_mean
from jaxdist.runtime.hardware import DEVICES, find_device
from jaxdist.trees import flatten_with_names, leaf_bytes, tree_bytes, tree_size
from jaxdist.types import Grads, Leaf, PyTree

FLOAT_BYTES = 4
FLAG_BYTES = 4
"""The bytes of the sum from which all devices know whether all encoded gradients are finite."""
CPU_CODING_BYTES_PER_SECOND = 1.4e10
"""The bytes of memory per second that a CPU core processes in coding. With this rate, the numbers
of passes in this module give 2.4 to 7 ns for each element of the gradients. The same time was
measured on a core of an EPYC, for gradients of 1.6 and 6.3 million elements."""
WHOLE_PASSES = 8.0
"""The number of passes over all gradients: they are scaled, packed, checked and unpacked, each with
a read and a write."""
MESSAGE_PASSES = 6.0
"""The number of passes over encoded gradients in addition to `WHOLE_PASSES`: the residual is read
and written, the gradient is encoded and decoded, decoded messages are summed, and the sum is
encoded."""
MORE_PASSES = {"sign": 4.0, "topk": 5.0, "lowrank": 4.0, "randomk": 3.0, "adaptive": 60.0}
"""The numbers of passes that some codecs take in addition to `MESSAGE_PASSES`, from times on a
single core. Sign has a second residual and packs bits, topk searches a threshold, lowrank
multiplies matrices, and adaptive sorts gains and packs planes."""
NIBBLE_PASSES = 14.0
"""The number of additional passes of quantize with 4 bits, where two codes share a byte."""


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a collective over some of the axes of a reduction.

    Attributes:
      kind: the name of the operation, such as "all_reduce".
      payload_bytes: the bytes of the whole tensor on one device, as in `Algorithm.traffic`.
      where: "all" for all axes, "inside" for the last axis, or "across" for all axes except the
        last.
    """

    kind: Operation
    payload_bytes: float
    where: str = "all"


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a compressed all-reduce.

    Attributes:
      wire_seconds: the time of the collectives in sequence, in seconds.
      coding_seconds: the time of encoding and decoding on each device, in seconds.
      sent_bytes: the bytes that the busiest device sends, over all links.
    """

    wire_seconds: float
    coding_seconds: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """The sum of the times of the collectives and of coding, in seconds."""
        return self.wire_seconds + self.coding_seconds


def coding_bytes_per_second(kind: str) -> float:
    """Return the bytes of memory per second that a device processes while it encodes and decodes.

    For a GPU or TPU this is the bandwidth of its memory (`runtime.hardware`). For a CPU the result
    is a measured rate of a core, since arithmetic takes longer on a CPU than access to memory.

    >>> coding_bytes_per_second("v5e")
    810000000000.0

    Raises:
      JaxdistError: the device is not known.
    """
    found = find_device(kind)
    if found is None:
        raise JaxdistError(
            f"the speed of codecs on {kind!r} is unknown: {did_you_mean(kind, DEVICES)}"
        )
    cpu = found.name == "cpu"
    return CPU_CODING_BYTES_PER_SECOND if cpu else found.memory_bytes_per_second


def predict(
    grads: Grads,
    choice: Choice,
    levels: Sequence[Level],
    *,
    bytes_per_second: float,
    inside: bool = False,
    algorithm: Algorithm = XLA,
    bucket_bytes: int = BUCKET_BYTES,
) -> Prediction:
    """Predict the cost of a compressed all-reduce, in the last stage of its codecs.

    Args:
      grads: the gradients of one device, or their shapes.
      choice: a codec, stages of codecs, or a choice for each parameter.
      levels: the size and link of each axis over which the gradients are summed. The axis with the
        slowest link comes first.
      bytes_per_second: the rate of coding, such as `coding_bytes_per_second` returns.
      inside: whether gradients are first summed without compression over the last axis. The shards
        of the sums are then encoded, and are sent over the other axes.
      algorithm: the algorithm of the collectives.
      bucket_bytes: the maximum number of bytes of a bucket.

    Raises:
      CompressionError: a codec cannot encode a leaf, the codecs of two stages need different
        buckets, or a rule matches no parameter.
    """
    found = calls(grads, choice, [level.size for level in levels], inside, bucket_bytes)
    parts = {"all": levels, "inside": levels[-1:], "across": levels[:-1]}
    seconds, sent = 0.0, 0.0
    for call in found:
        here = parts[call.where]
        sizes = tuple(level.size for level in here)
        seconds += collective_seconds(algorithm, call.kind, call.payload_bytes, here)
        sent += algorithm.traffic(call.kind, call.payload_bytes, sizes).sent_bytes
    own = shard_shapes(grads, levels[-1].size) if inside else grads
    passed = coding_bytes(own, choice, bucket_bytes)
    return Prediction(seconds, passed / bytes_per_second, sent)


def calls(
    grads: Grads,
    choice: Choice,
    sizes: Sequence[int],
    inside: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[CollectiveCall]:
    """Return the collectives of a compressed all-reduce, in order.

    Args:
      grads, choice, inside, bucket_bytes: the arguments of `predict`.
      sizes: the sizes of the axes. The axis with the slowest link comes first.
    """
    if not inside:
        return _message_calls(grads, choice, math.prod(sizes), bucket_bytes, "all")
    shards = shard_shapes(grads, sizes[-1])
    whole = _bytes_alike(grads, shards)
    split = tree_bytes(grads) - whole
    before = [CollectiveCall("reduce_scatter", split, "inside")]
    if whole:
        before.append(CollectiveCall("all_reduce", whole, "inside"))
    between = _message_calls(shards, choice, math.prod(sizes[:-1]), bucket_bytes, "across")
    return [*before, *between, CollectiveCall("all_gather", split, "inside")]


def shard_shapes(grads: Grads, count: int) -> Grads:
    """Return the shapes of a device's shards, for a split of each leaf into `count` shards.

    A leaf is split along the first dim whose length is a multiple of `count`. A leaf without such a
    dim is not split.

    >>> import jax.numpy as jnp
    >>> shard_shapes({"w": jnp.zeros((3, 8)), "b": jnp.zeros(3)}, 4)["w"].shape
    (3, 2)
    """

    def shard(leaf: Leaf) -> Leaf:
        shape = list(leaf.shape)
        dim = next((i for i, n in enumerate(shape) if n and n % count == 0), None)
        if dim is not None:
            shape[dim] //= count
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    shards: PyTree = jax.tree.map(shard, grads)
    return shards


def coding_bytes(grads: Grads, choice: Choice, bucket_bytes: int = BUCKET_BYTES) -> float:
    """Return the bytes of memory that a device reads and writes to encode and decode."""
    named = flatten_with_names(grads)
    total = WHOLE_PASSES * FLOAT_BYTES * tree_size(grads)
    for group in plan_groups(named, choice, NoFeedback(), bucket_bytes):
        if not group.lossless:
            size = sum(math.prod(named[i][1].shape) for i in group.positions)
            total += (MESSAGE_PASSES + _more_passes(group.codecs[-1])) * FLOAT_BYTES * size
    return total


def _more_passes(codec: Codec) -> float:
    if isinstance(codec, Quantize) and codec.bits < 8:
        return NIBBLE_PASSES
    return MORE_PASSES.get(getattr(codec, "type", ""), 0.0)


def _bytes_alike(grads: Grads, shards: Grads) -> float:
    """Return the bytes of the leaves that are not split into shards."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(shards), strict=True)
    return sum(leaf_bytes(leaf) for leaf, shard in pairs if leaf.shape == shard.shape)


def _message_calls(
    grads: Grads, choice: Choice, devices: int, bucket_bytes: int, where: str
) -> list[CollectiveCall]:
    named = flatten_with_names(grads)
    groups = plan_groups(named, choice, NoFeedback(), bucket_bytes)
    found = []
    for group in groups:
        found += _group_calls(group, group.likes([leaf for _, leaf in named]), devices, where)
    if not all(group.lossless for group in groups):
        found.append(CollectiveCall("all_reduce", FLAG_BYTES, where))
    return found


def _group_calls(
    group: CodecGroup, likes: Sequence[jax.ShapeDtypeStruct], devices: int, where: str
) -> list[CollectiveCall]:
    codec = group.codecs[-1]
    if not group.in_shards and codec.exchange == "sum":
        assert isinstance(codec, LinearCodec), codec
        return [CollectiveCall("all_reduce", size, where) for size in round_bytes(codec, likes)]
    kinds: tuple[Operation, ...] = ("all_gather",)
    if group.in_shards:
        kinds = ("all_to_all", "all_gather")
        likes = [
            jax.ShapeDtypeStruct((-(-like.shape[0] // devices),), like.dtype) for like in likes
        ]
    messages = [devices * codec.wire_bytes(like) for like in likes]
    return [CollectiveCall(kind, size, where) for size in messages for kind in kinds]


def round_bytes(codec: LinearCodec, likes: Sequence[Leaf]) -> list[int]:
    """Return the bytes of each all-reduce of a linear codec, for several tensors together."""
    found: list[int] = []

    def run(xs: Sequence[jax.Array]) -> PyTree:
        def total(parts: list[jax.Array]) -> list[jax.Array]:
            found.append(tree_bytes(parts))
            return parts

        rounds = [codec.factors(x, codec.init(x), first_round()) for x in xs]
        return [factored.total for factored in in_lockstep(rounds, total)]

    jax.eval_shape(run, list(likes))
    return found
