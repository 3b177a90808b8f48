"""The base classes of codecs: frozen configs that encode an array as a message.

A codec has three methods, for an array `x` of any floating dtype with the shape of `like`:

    init(like) -> state                          a tree of arrays; () for codecs without memory
    encode(x, state, round) -> message, state    a tree of unsigned integers, of static shapes
    decode(message, like, round) -> estimate     float32, near x

Messages are packed unsigned integers, since some backends widen small floats in every collective.
Encoding and decoding run under `jax.jit`, `jax.vmap` and inside `jax.shard_map`. An estimate has
the same bits on every device that decodes the message. All devices that have a message know its
`round` without communication.

The codec's `exchange` is the method by which the messages of several devices are combined. The
method "scatter" decodes and sums shards, and encodes the sums. The method "gather" sends every
message to every device. The method "sum" adds the messages of a `LinearCodec`, for which the sum of
messages is the message of the sum.
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
"""The state of a codec between rounds: a tree of arrays."""
Exchange = Literal["scatter", "gather", "sum"]


class Round(NamedTuple):
    """A round of messages, with the data that all devices know without communication.

    Attributes:
      step: the number of earlier rounds, an int32 scalar.
      key: a random key, the same on all devices.
      rank: the rank of the device that encodes a message, an int32 scalar, which `decode` does not
        read.
    """

    step: jax.Array
    key: jax.Array
    rank: jax.Array

    @property
    def own_key(self) -> jax.Array:
        """A random key that no other device has in this round."""
        return jax.random.fold_in(self.key, self.rank)

    def part(self, index: jax.Array | int) -> Round:
        """Return this round with another key, for the message with index `index` of the round."""
        return self._replace(key=jax.random.fold_in(self.key, index))


def first_round(seed: int = 0, step: int | jax.Array = 0, rank: int | jax.Array = 0) -> Round:
    """Return the round of a step for the device with the given rank.

    Args:
      seed: the seed of all random choices.
      step: the number of earlier rounds.
      rank: the rank of the device that encodes.

    >>> int(first_round(step=3).step)
    3
    """
    count = jnp.asarray(step, jnp.int32)
    # The constant makes these keys different from the keys into which a train step folds its count.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x636F6465), count)
    return Round(count, key, jnp.asarray(rank, jnp.int32))


class Codec(Config):
    """The base class of codecs, which encode an array in few bytes.

    A codec is a config: an instance has the settings, and its methods encode and decode. The module
    docstring defines `encode` and `decode`.

    Attributes:
      exchange: the method by which the messages of several devices are combined.
      flat: whether the codec ignores the shape of an array, so that several arrays can be packed
        into one array.
    """

    exchange: ClassVar[Exchange] = "scatter"
    lossless: ClassVar[bool] = False
    """Whether every estimate is equal to the encoded array."""
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
        """Whether an error has a smaller norm than the array, as error feedback requires."""
        return not self.unbiased

    def check(self, like: Leaf, name: str = "") -> None:
        """Raise CompressionError if this codec cannot encode an array.

        Args:
          like: the array, or its shape and dtype.
          name: the name of the parameter, for the error message.
        """
        if not jnp.issubdtype(like.dtype, jnp.floating):
            raise CompressionError(
                f"{described(self, like, name)}: codecs encode only floating-point arrays; send "
                "the array uncompressed with a rule (codec whole), or cast it to float32 first"
            )
        if 0 in like.shape:
            raise CompressionError(
                f"{described(self, like, name)}: the array is empty, so there is nothing to "
                "encode; leave empty arrays out"
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
        """Return the sum of `total` and the estimate of a message.

        Codecs with sparse messages override this method.
        """
        return total + self.decode(message, like, round)

    def wire_bytes(self, like: Leaf) -> int:
        """Return the size of an array's message in bytes, which depends only on the shape.

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
    """The base class of codecs whose messages are summed over devices, in one or more all-reduces.

    `factors` is a generator function. A generator yields this device's float32 summand, and
    receives the sum over all devices, once for each all-reduce. The generators of many tensors can
    therefore run in lockstep, with a common all-reduce for their first sums, their second sums, and
    so on.
    """

    exchange: ClassVar[Exchange] = "sum"

    @abstractmethod
    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors: ...

    @abstractmethod
    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        """Return the float32 estimate of the array from its factors, with the shape of `like`."""
        ...

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        (found,) = in_lockstep([self.factors(x, state, round)], lambda parts: parts)
        return tuple(to_words(factor) for factor in found.own), found.state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        return self.expand(tuple(from_words(word, jnp.float32) for word in message), like, round)


def in_lockstep(
    generators: Sequence[Factors], total: Callable[[list[jax.Array]], list[jax.Array]]
) -> list[Factored]:
    """Run the generators of several tensors in lockstep, and return the result of each.

    Args:
      generators: the generators that `LinearCodec.factors` returns, one for each tensor.
      total: the function from this device's summands to the sums over all devices. The function is
        called once for the first sums of all generators, once for the second sums, and so on.
    """
    found: dict[int, Factored] = {}
    sent: dict[int, jax.Array | None] = dict.fromkeys(range(len(generators)))
    while sent:
        parts: dict[int, jax.Array] = {}
        for index, received in sent.items():
            try:
                # A generator is started by sending None, although it later receives arrays.
                parts[index] = generators[index].send(received)  # pyright: ignore[reportArgumentType]
            except StopIteration as stop:
                found[index] = stop.value
        sent = dict(zip(parts, total(list(parts.values())) if parts else [], strict=True))
    return [found[index] for index in range(len(generators))]


@runtime_checkable
class Selector(Protocol):
    """The protocol of codecs that select elements of an array, for use in a `Chain`."""

    def select(self, x: jax.Array, round: Round) -> tuple[Message, jax.Array]:
        """Return the positions and the values of the selected elements.

        The positions are () if they follow from the round.
        """
        ...

    def place(self, where: Message, values: jax.Array, like: Leaf, round: Round) -> jax.Array:
        """Return a float32 array with the values at their positions, and zeros elsewhere."""
        ...


def described(codec: Codec, like: Leaf, name: str = "") -> str:
    """Describe a codec and an array: "sign of parameter layers/kernel int32[3]", for an error."""
    parameter = f" parameter {name}" if name else ""
    kind: PyTree = getattr(codec, "type", type(codec).__name__)
    return f"{kind} of{parameter} {like.dtype}{list(like.shape)}"
