"""The contract of codecs: a codec is a frozen config that encodes an array as a message.

For an array `x` with the shape of `like` and any floating dtype:

    init(like) -> state                          a tree of arrays; () for codecs without memory
    encode(x, state, round) -> message, state    a tree of unsigned integers, of static shapes
    decode(message, like, round) -> estimate     float32, near x

Messages are packed unsigned integers, since some backends widen small floats in every collective.
Encoding and decoding run under `jax.jit`, `jax.vmap` and inside `jax.shard_map`; an estimate has
the same bits on every device that decodes its message. All holders of a message know its `round`
without communication.

The codec's `exchange` says how the messages of several devices are combined: "scatter" decodes and
sums shards and encodes the sum again, "gather" sends every message to every device, and "sum"
adds the messages of a `LinearCodec`, for which the sum of messages is the message of the sum.
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
"""An encoded array: a tree of unsigned integer arrays."""
CodecState: TypeAlias = Any
"""The values that a codec keeps between rounds: a tree of arrays."""
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
        """Return this round with another key, for message `index` of several in the round."""
        return self._replace(key=jax.random.fold_in(self.key, index))


def first_round(seed: int = 0, step: int | jax.Array = 0, rank: int | jax.Array = 0) -> Round:
    """Return the round of a step for the device with the given rank.

    >>> int(first_round(step=3).step)
    3
    """
    count = jnp.asarray(step, jnp.int32)
    # The constant makes these keys different from those into which a training step folds its count.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x636F6465), count)
    return Round(count, key, jnp.asarray(rank, jnp.int32))


class Codec(Config):
    """A method of encoding an array in few bytes; an instance is both its settings and its code.

    Attributes:
      exchange: the method by which the messages of several devices are combined.
      flat: whether the codec ignores the shape, so that several tensors can be packed into one.
    """

    exchange: ClassVar[Exchange] = "scatter"
    flat: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        """Whether `x - decode(encode(x))` is computed without rounding for every float32 x.

        The difference is exact if every estimate is zero or between half of x and twice x
        (Sterbenz's lemma).
        """
        return True

    @property
    def unbiased(self) -> bool:
        """Whether the mean of an estimate over many rounds is the encoded number."""
        return False

    @property
    def contractive(self) -> bool:
        """Whether the error is smaller than the encoded array, which error feedback requires."""
        return not self.unbiased

    @property
    def lossless(self) -> bool:
        """Whether every estimate is equal to the encoded array."""
        return False

    def check(self, like: Leaf, name: str = "") -> None:
        """Raise CompressionError for an array that this codec cannot encode.

        Args:
          like: the array, or its shape and dtype.
          name: name of the parameter, for the message.
        """
        if not jnp.issubdtype(like.dtype, jnp.floating):
            raise CompressionError(
                f"{described(self, like, name)}: codecs encode only floating-point arrays; leave "
                "the array whole by a rule, or cast it to float32 first"
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
        """Add the estimate of a message to `total`; codecs with sparse messages override it."""
        return total + self.decode(message, like, round)

    def wire_bytes(self, like: Leaf) -> int:
        """Return the size in bytes of an array's message, which depends only on the shape.

        Raises:
          CompressionError: the codec cannot encode the array.
        """
        self.check(like)
        x = jax.ShapeDtypeStruct(like.shape, like.dtype)

        def message(x: jax.Array) -> Message:
            return self.encode(x, self.init(x), first_round())[0]

        return tree_bytes(jax.eval_shape(message, x))


class Factored(NamedTuple):
    """The result of `LinearCodec.factors`.

    Attributes:
      own: the factors that expand to the estimate of this device's array.
      total: the factors that expand to the estimate of the sum over devices.
      state: the codec's next state.
    """

    own: tuple[jax.Array, ...]
    total: tuple[jax.Array, ...]
    state: CodecState


Factors: TypeAlias = Generator[jax.Array, jax.Array, Factored]


class LinearCodec(Codec):
    """A codec whose messages are added up over devices, in one or several all-reduces.

    `factors` is a generator: it yields this device's float32 term of a sum, and receives the sum
    over all devices. The generators of many tensors can therefore run in lockstep, and their n-th
    sums share an all-reduce.
    """

    exchange: ClassVar[Exchange] = "sum"

    @abstractmethod
    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors: ...

    @abstractmethod
    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        """Return the float32 estimate that the factors represent, with the shape of `like`."""
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
    """Run the generators of several tensors, and compute their n-th sums together.

    Args:
      generators: results of `LinearCodec.factors`, one for each tensor.
      total: function from this device's terms to the sums over all devices.
    """
    found: dict[int, Factored] = {}
    sent: dict[int, jax.Array | None] = dict.fromkeys(range(len(generators)))
    while sent:
        parts: dict[int, jax.Array] = {}
        for index, received in sent.items():
            try:
                # A generator can only be started by None, whatever type it receives later.
                parts[index] = generators[index].send(received)  # pyright: ignore[reportArgumentType]
            except StopIteration as stop:
                found[index] = stop.value
        sent = dict(zip(parts, total(list(parts.values())) if parts else [], strict=True))
    return [found[index] for index in range(len(generators))]


@runtime_checkable
class Selector(Protocol):
    """A codec that selects elements of an array, which another codec may then encode."""

    def select(self, x: jax.Array, round: Round) -> tuple[Message, jax.Array]:
        """Return the positions (empty if the round determines them) and the selected values."""
        ...

    def place(self, where: Message, values: jax.Array, like: Leaf, round: Round) -> jax.Array:
        """Return a float32 array of zeros with the values at their positions."""
        ...


def described(codec: Codec, like: Leaf, name: str = "") -> str:
    """Describe a codec and an array for an error, as `sign of parameter layers/kernel int32[3]`."""
    parameter = f" parameter {name}" if name else ""
    kind: PyTree = getattr(codec, "type", type(codec).__name__)
    return f"{kind} of{parameter} {like.dtype}{list(like.shape)}"
