"""The base class of algorithms: a frozen config with six methods on flat arrays, and their cost.

The methods run inside `jax.shard_map` and see the data of a single device. N is the size of the
axis, or the product of the sizes if `axis` is a tuple. `rank` is the index of the device along the
axis. `combine` is `lax.add`, `lax.max` or `lax.min`. `reference.py` defines the same results on
lists of arrays:

    all_reduce(flat[n])        -> [n]      the combination of all devices' arrays, on all of them
    reduce_scatter([N, c])     -> [c]      row `rank` of the combination
    all_gather([c])            -> [N, c]   row i is the block of device i
    broadcast(flat[n], root)   -> [n]      the array of device `root`
    reduce(flat[n], root)      -> [n]      the combination on `root`, anything elsewhere
    all_to_all([N, c])         -> [N, c]   row i is row `rank` of device i

N is at least 2, and n is at least 1. The results of all_reduce, all_gather and broadcast have the
same bits on all devices: each element is combined once, in a single order, and then copied. The
module `operations.py` has the checks, padding, casts and derivatives for all algorithms.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis
from jaxdist.config.schema import Config, Count

Combine = Callable[[jax.Array, jax.Array], jax.Array]
Operation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"
]
KINDS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True)
class Traffic:
    """The cost of a call of a collective.

    The numbers are exact if the payload divides evenly among the devices. On links with latency a
    and bandwidth b, the time of the call is about `steps * a + serial_bytes / b`.
    """

    steps: int
    """The number of messages in the longest chain in which each message waits for the previous
    message."""
    sent_bytes: float
    """The number of bytes that the busiest device sends, over all of its links."""
    serial_bytes: float
    """The number of bytes of the messages in the longest chain."""
    messages: int
    """The number of collective operations in the compiled program, some of which may run at the
    same time."""

    def __add__(self, other: Traffic) -> Traffic:
        """Return the cost of two calls in sequence."""
        return Traffic(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.serial_bytes + other.serial_bytes,
            self.messages + other.messages,
        )


NOTHING = Traffic(0, 0.0, 0.0, 0)
Size = int | tuple[int, ...]
"""The number of devices on an axis, or a tuple with the number for each of several axes. The axis
across the slowest network comes first."""


class Algorithm(Config):
    """The base class of algorithms for collectives.

    An algorithm is a config: an instance has the settings of the algorithm, and its methods run the
    collectives. The module docstring defines the methods.
    """

    accumulate: Literal["float32"] | None = None
    """The dtype in which bfloat16 and float16 inputs are sent and summed. float32 is more exact and
    doubles the bytes; null keeps the dtype of the inputs."""
    bucket_bytes: Count | Literal["auto"] | None = "auto"
    """The size, in bytes, of the buckets into which the leaves of a tree are fused. With `auto`,
    leaves are fused if fusing is predicted to be faster; with null, each leaf is sent by itself."""

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
        """Combine all devices' arrays on the root, [n] -> [n]; the other devices get any values."""

    @abstractmethod
    def all_to_all(self, blocks: jax.Array, axis: Axis) -> jax.Array:
        """Send row i to device i, and return the received rows, [N, c] -> [N, c]."""

    def traffic(self, kind: Operation, payload_bytes: float, size: Size) -> Traffic:
        """Compute the cost of a call on `size` devices from a formula.

        Args:
          kind: the name of the operation, such as "all_reduce".
          payload_bytes: the bytes of the whole tensor on one device, in the dtype that is sent
            (`accumulate`). The tensor is the input, or the result for all_gather.
          size: the number of devices on the axis, or a tuple with the number for each axis. The
            axis across the slowest network comes first.
        """
        count = math.prod(size) if isinstance(size, tuple) else size
        assert kind in KINDS, kind
        return self._traffic(kind, float(payload_bytes), count) if count > 1 else NOTHING

    @abstractmethod
    def _traffic(self, kind: Operation, payload_bytes: float, size: int) -> Traffic:
        """Compute the cost of a call, as `traffic` does, for an axis of two or more devices."""


def split_padded(flat: jax.Array, count: int) -> jax.Array:
    """Divide an array [n] into rows, [count, ceil(n / count)], and pad the last rows with zeros."""
    width = -(-flat.size // count)
    padding = width * count - flat.size
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(count, width)
