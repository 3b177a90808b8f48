"""The contract of algorithms: a frozen config with six methods on flat arrays, and their cost.

The methods run inside `jax.shard_map` and see a single device's data. N is the size of the axis
(the product of the sizes, when `axis` is a tuple), `rank` the device's index along it; `combine` is
`lax.add`, `lax.max` or `lax.min`. `reference.py` defines the results on plain lists:

    all_reduce(flat[n])        -> [n]      the combination of all devices' arrays, on all of them
    reduce_scatter([N, c])     -> [c]      row `rank` of the combination
    all_gather([c])            -> [N, c]   row i is the block of device i
    broadcast(flat[n], root)   -> [n]      the array of device `root`
    reduce(flat[n], root)      -> [n]      the combination on `root`, anything elsewhere
    all_to_all([N, c])         -> [N, c]   row i is row `rank` of device i

N is at least 2, n at least 1. Results of all_reduce, all_gather and broadcast have the same bits on
all devices: each element is combined once, in a single order, and then copied. Checks, padding,
casts and derivatives are common to all algorithms, in `operations.py`.
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
    """The cost of a call; exact where the payload divides evenly among the devices.

    The time on links of latency a and bandwidth b is about `steps * a + serial_bytes / b`.
    """

    steps: int
    """The number of messages in the longest chain, in which each waits for its predecessor."""
    sent_bytes: float
    """The bytes that the busiest device sends, over all of its links."""
    serial_bytes: float
    """The bytes of the messages in the longest chain, which are sent one after another."""
    messages: int
    """The number of collectives in the compiled program; independent collectives run at once."""

    def __add__(self, other: Traffic) -> Traffic:
        """Add the costs of consecutive calls."""
        return Traffic(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.serial_bytes + other.serial_bytes,
            self.messages + other.messages,
        )


NOTHING = Traffic(0, 0.0, 0.0, 0)
Size = int | tuple[int, ...]
"""The number of devices on an axis, or on each of several axes, slowest first."""


class Algorithm(Config):
    """An algorithm for the collectives; the config that chooses it also has its methods."""

    accumulate: Literal["float32"] | None = None
    """The dtype in which bfloat16 and float16 inputs are sent and summed, at twice the bytes; null
    keeps their own dtype."""
    bucket_bytes: Count | Literal["auto"] | None = "auto"
    """The size of the buckets into which the leaves of a tree are fused; `auto` fuses where that is
    faster, null never."""

    native: ClassVar[bool] = False
    """Whether JAX itself differentiates this algorithm and types its results as replicated."""

    @abstractmethod
    def all_reduce(self, flat: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        """Combine all devices' arrays, [n] -> [n]."""

    @abstractmethod
    def reduce_scatter(self, blocks: jax.Array, axis: Axis, combine: Combine) -> jax.Array:
        """Combine all devices' arrays and return this device's row, [N, c] -> [c]."""

    @abstractmethod
    def all_gather(self, block: jax.Array, axis: Axis) -> jax.Array:
        """Gather all devices' blocks, [c] -> [N, c]."""

    @abstractmethod
    def broadcast(self, flat: jax.Array, axis: Axis, root: int) -> jax.Array:
        """Copy the root's array to all devices, [n] -> [n]."""

    @abstractmethod
    def reduce(self, flat: jax.Array, axis: Axis, root: int, combine: Combine) -> jax.Array:
        """Combine all devices' arrays on the root, [n] -> [n]; other devices return anything."""

    @abstractmethod
    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        """Send row i to device i, and return the rows received, [N, c] -> [N, c]."""

    def traffic(self, kind: Operation, payload_bytes: float, size: Size) -> Traffic:
        """Compute the cost of a call on `size` devices from a formula.

        Args:
          kind: the operation.
          payload_bytes: bytes of the whole tensor on one device: the input, or for all_gather the
            result, in the dtype that is sent (`accumulate`).
          size: number of devices on the axis, or on each axis of a tuple, slowest first.
        """
        count = math.prod(size) if isinstance(size, tuple) else size
        assert kind in KINDS, kind
        return self._traffic(kind, float(payload_bytes), count) if count > 1 else NOTHING

    @abstractmethod
    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        """Compute `traffic` for at least two devices on a single axis."""


def split_padded(flat: jax.Array, count: int) -> jax.Array:
    """Split [n] -> [count, ceil(n / count)], padded with zeros."""
    width = -(-flat.size // count)
    padding = width * count - flat.size
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(count, width)
