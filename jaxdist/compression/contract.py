"""The contract of codecs: a frozen config that turns an array into a message, and back.

The law, for an array `x` of `like.shape` in any floating dtype:

    init(like) -> state                          a tree of arrays; () for codecs without memory
    encode(x, state, round) -> message, state    a tree of unsigned integers, of static shapes
    decode(message, like, round) -> estimate     float32, near x

Messages are packed unsigned integers, since some backends widen small floats in every collective.
Encoding and decoding run under `jax.jit`, `jax.vmap` and inside `jax.shard_map`; an estimate has
the same bits wherever its message is decoded. `round` is common knowledge of all holders of a
message.

The codec's `exchange` is the way in which messages of several devices are combined: "scatter"
decodes and sums shards and encodes the sum again, "gather" sends every message to every device, and
"sum" adds the messages of a `LinearCodec`, for which the sum of messages is the message of the sum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from jaxdist.compression.wire import from_words, to_words
from jaxdist.config.schema import Config
from jaxdist.errors import CompressionError
from jaxdist.trees import tree_bytes
from jaxdist.types import Leaf, PyTree

Message: TypeAlias = Any
"""A tree of unsigned integer arrays."""
CodecState: TypeAlias = Any
"""A codec's memory from round to round: a tree of arrays."""
Exchange = Literal["scatter", "gather", "sum"]


class Round(NamedTuple):
    """The data that every holder of a message knows without communication.

    Attributes:
      step: number of earlier rounds, an int32 scalar.
      key: a random key, the same on all devices.
      rank: rank of the encoding device, an int32 scalar; decoders do not read it.
    """

    step: jax.Array
    key: jax.Array
    rank: jax.Array

    @property
    def own_key(self) -> jax.Array:
        """Return a key that no other device has in this round."""
        return jax.random.fold_in(self.key, self.rank)

    def part(self, index: jax.Array | int) -> Round:
        """Return the round of one of several messages that a device sends."""
        return self._replace(key=jax.random.fold_in(self.key, index))


def first_round(seed: int = 0, step: int | jax.Array = 0, rank: int | jax.Array = 0) -> Round:
    """Return the round of a step, for a device of this rank.

    >>> int(first_round(step=3).step)
    3
    """
    count = jnp.asarray(step, jnp.int32)
    # The constant separates these keys from those into which a training step folds its own count.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x636F6465), count)
    return Round(count, key, jnp.asarray(rank, jnp.int32))


class Codec(Config):
    """A way to write an array in few bytes; an instance is both a config's choice and the code.

    Attributes:
      exchange: how the messages of several devices are combined.
      flat: whether only the number of elements matters, so that tensors can be packed end to end.
    """

    exchange: ClassVar[Exchange] = "scatter"
    flat: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        """Whether `x - decode(encode(x))` is a float32 for every float32 x.

        It is, if every estimate is zero or between half of x and twice x (Sterbenz).
        """
        return True

    @property
    def unbiased(self) -> bool:
        """Whether the mean of the estimate over rounds is x."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether the estimate is nearer to x than zero is, as error feedback needs."""
        return not self.unbiased

    @property
    def lossless(self) -> bool:
        """Whether the estimate is equal to x."""
        return False

    def check(self, like: Leaf, name: str = "") -> None:
        """Raise CompressionError for an array that this codec cannot encode.

        Args:
          like: the array, or its shape and dtype.
          name: name of the parameter, for the message.
        """
        if not jnp.issubdtype(like.dtype, jnp.floating):
            raise CompressionError(
                f"{described(self, like, name)}: codecs take floating-point arrays; leave it whole "
                "by a rule, or cast it to float32 first"
            )
        if 0 in like.shape:
            raise CompressionError(
                f"{described(self, like, name)}: there is nothing to encode; leave empty arrays out"
            )

    def init(self, like: Leaf) -> CodecState:
        """Return the state before the first round, which is the same on all devices."""
        return ()

    @abstractmethod
    def encode(
        self, x: jax.Array, state: CodecState, round: Round
    ) -> tuple[Message, CodecState]: ...

    @abstractmethod
    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array: ...

    def add(self, total: jax.Array, message: Message, like: Leaf, round: Round) -> jax.Array:
        """Add the estimate to `total`."""
        return total + self.decode(message, like, round)

    def wire_bytes(self, like: Leaf) -> int:
        """Return the bytes of an array's message, which are static.

        Raises:
          CompressionError: as `check`.
        """
        self.check(like)
        x = jax.ShapeDtypeStruct(like.shape, like.dtype)

        def message(x: jax.Array) -> Message:
            return self.encode(x, self.init(x), first_round())[0]

        return tree_bytes(jax.eval_shape(message, x))


class Factored(NamedTuple):
    """The results of the rounds of a `LinearCodec`.

    Attributes:
      own: the factors of this device's array.
      total: the factors of the sum over devices.
      state: the next state.
    """

    own: tuple[jax.Array, ...]
    total: tuple[jax.Array, ...]
    state: CodecState


Factors: TypeAlias = Generator[jax.Array, jax.Array, Factored]


class LinearCodec(Codec):
    """A codec whose messages are added up, in one or in several rounds of sums.

    `factors` is a generator: it yields this device's float32 term of a sum, and receives the sum
    over all devices. Codecs of any number of rounds, and many tensors at once, therefore run in
    lockstep, with one fused all-reduce for each round.
    """

    exchange: ClassVar[Exchange] = "sum"

    @abstractmethod
    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors: ...

    @abstractmethod
    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        """Return the estimate from factors, float32 of `like.shape`."""
        ...

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        (found,) = in_lockstep([self.factors(x, state, round)], lambda parts: parts)
        return tuple(to_words(factor) for factor in found.own), found.state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        return self.expand(tuple(from_words(word, jnp.float32) for word in message), like, round)


def in_lockstep(
    generators: Sequence[Factors],
    total: Callable[[list[jax.Array]], list[jax.Array]],
) -> list[Factored]:
    """Run the generators of several tensors, with the sums of each round together.

    Args:
      total: function from this device's terms to the sums over all devices.
    """
    found: dict[int, Factored] = {}
    sent: dict[int, jax.Array | None] = dict.fromkeys(range(len(generators)))
    while sent:
        parts: dict[int, jax.Array] = {}
        for index, received in sent.items():
            try:
                # None starts a generator, whatever type it receives later.
                parts[index] = generators[index].send(received)  # pyright: ignore[reportArgumentType]
            except StopIteration as stop:
                found[index] = stop.value
        sent = dict(zip(parts, total(list(parts.values())) if parts else [], strict=True))
    return [found[index] for index in range(len(generators))]


@runtime_checkable
class Selector(Protocol):
    """A codec that sends some elements of an array, which another codec may encode in turn."""

    def select(self, x: jax.Array, round: Round) -> tuple[Message, jax.Array]:
        """Return the elements, and their positions as far as the round does not determine them."""
        ...

    def place(self, where: Message, values: jax.Array, like: Leaf, round: Round) -> jax.Array:
        """Place the elements among zeros, float32."""
        ...


def described(codec: Codec, like: Leaf, name: str = "") -> str:
    """Describe an array for an error message: `sign of parameter layers/kernel int32[3,4]`."""
    parameter = f" parameter {name}" if name else ""
    kind: PyTree = getattr(codec, "type", type(codec).__name__)
    return f"{kind} of{parameter} {like.dtype}{list(like.shape)}"
