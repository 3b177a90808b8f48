"""What every algorithm is: a frozen configuration with six methods on flat arrays, and their cost.

The methods run inside `jax.shard_map` and see one device's data. N is the size of the axis (of the
axes together, flattened, when `axis` is a tuple), `rank` the device's index along it; `combine` is
`lax.add`, `lax.max` or `lax.min`. The law, which `reference.py` states on plain lists:

    all_reduce(flat[n])        -> [n]      the combination of all devices' arrays, on all of them
    reduce_scatter([N, c])     -> [c]      row `rank` of the combination
    all_gather([c])            -> [N, c]   row i is the block of device i
    broadcast(flat[n], root)   -> [n]      the array of device `root`
    reduce(flat[n], root)      -> [n]      the combination on `root`, anything elsewhere
    all_to_all([N, c])         -> [N, c]   row i is row `rank` of device i

N and n are at least 2 and 1. Results of all_reduce, all_gather and broadcast have the same bits on
all devices: each element is combined once, in one order, and then copied. What is checked, padded,
cast and differentiated is the same for all algorithms and lives in `operations.py`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis
from jaxdist.config.schema import Config, Count

Combine = Callable[[jax.Array, jax.Array], jax.Array]
Operation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"
]
KINDS: tuple[Operation, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
)


@dataclass(frozen=True)
class Traffic:
    """What one call costs; exact where the payload divides evenly among the devices.

    The time on links of latency a and bandwidth b is about `steps * a + serial_bytes / b`.
    """

    steps: int
    """Messages that must wait for one another: the longest chain."""
    sent_bytes: float
    """Bytes that the busiest device sends, over all of its links."""
    serial_bytes: float
    """Bytes along the longest chain: what the busiest link carries while others wait for it."""
    messages: int
    """Collectives in the compiled program; those that do not wait for one another fly at once."""

    def __add__(self, other: Traffic) -> Traffic:
        """One call after the other."""
        return Traffic(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.serial_bytes + other.serial_bytes,
            self.messages + other.messages,
        )


NOTHING = Traffic(0, 0.0, 0.0, 0)
Size = int | tuple[int, ...]
"""Devices on one axis, or on each of several, slowest first."""


class Algorithm(Config):
    """One way to run the collectives; an instance is both the choice in a config and the code."""

    accumulate: Literal["float32"] | None = None
    """Carry and sum bfloat16 and float16 inputs in this dtype, at twice the bytes; null: as is."""
    bucket_bytes: Count | Literal["auto"] | None = "auto"
    """Fuse the leaves of a tree into buckets of this size; auto: where it pays; null: never."""

    native: ClassVar[bool] = False
    """Whether JAX differentiates this algorithm by itself and types its results as replicated."""

    @abstractmethod
    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        """[n] -> [n]."""

    @abstractmethod
    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        """[N, c] -> [c]."""

    @abstractmethod
    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        """[c] -> [N, c]."""

    @abstractmethod
    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        """[n] -> [n]."""

    @abstractmethod
    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        """[n] -> [n]."""

    @abstractmethod
    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        """[N, c] -> [N, c]."""

    def traffic(self, kind: Operation, payload_bytes: float, size: Size) -> Traffic:
        """The formula of one call on `size` devices.

        Args:
          kind: the operation.
          payload_bytes: of the whole tensor on one device: the input, for all_gather the result,
            in the dtype that is carried (`accumulate`).
          size: devices on the axis, or on each axis of a tuple, slowest first.
        """
        count = math.prod(size) if isinstance(size, tuple) else size
        assert kind in KINDS, kind
        return self._traffic(kind, float(payload_bytes), count) if count > 1 else NOTHING

    @abstractmethod
    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        """`traffic` for at least two devices on one axis."""


def split(flat: jax.Array, count: int) -> jax.Array:
    """[n] -> [count, ceil(n / count)], padded with zeros."""
    width = -(-flat.size // count)
    padding = width * count - flat.size
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(count, width)
