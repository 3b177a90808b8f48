"""Matmuls that overlap, chunk by chunk, with their collectives over a tensor axis.

If a tensor axis splits the sequence of the residual stream, an MLP usually begins with an
all-gather of its input and ends with a reduce-scatter of its result. This module instead sends each
device's chunk of the sequence around a ring, in both directions at the same time. A device
multiplies the chunks that it has while the next chunks arrive. The partial sums of the result
travel over the same hops in reverse (Wang et al., "Overlap Communication with Dependent Computation
via Decomposition", ASPLOS 2023).

Each device processes the chunks in the order in which they arrive, which differs between devices.
The chunks are not sorted: the result of an MLP does not depend on the order of the sequence, and
sorting would copy data. The gradient of a kernel is a single matmul over several chunks, because
XLA would all-reduce a separate gradient of each chunk over the data axis.

Dims: B batch, L sequence, D embed, F mlp, n devices on the ring, l = L / n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Pieces = tuple[jax.Array, ...]
"""The chunks of a sequence, arrays `[B, l, ...]`, in the order of `distances`."""

MOST_READ = 4
"""The maximum number of stacked chunks that XLA:TPU reads inside a matmul without copying them."""


def distances(count: int) -> list[int]:
    """Return the number of hops over which each chunk of a ring arrives, the nearest chunk first.

    A positive number is for one direction of the ring, and a negative number for the other
    direction.

    >>> distances(5), distances(4)
    ([0, 1, -1, 2, -2], [0, 1, -1, 2])
    """
    return sorted(range(-((count - 1) // 2), count // 2 + 1), key=lambda d: (abs(d), d < 0))


@dataclass(frozen=True)
class AxisRing:
    """A ring of the devices of a mesh axis, inside a `jax.shard_map` that is manual on the axis.

    Attributes:
      axis: the name of the mesh axis.
    """

    axis: str

    def gathered(self, x: jax.Array) -> Pieces:
        """Gather the chunks of all devices.

        Args:
          x: this device's chunk, `[B, l, ...]`.

        Returns:
          The chunks of all devices, in the order of their distance on the ring.
        """
        count = jax.lax.axis_size(self.axis)
        found = {0: x}
        for distance in distances(count)[1:]:
            step = 1 if distance > 0 else -1
            found[distance] = self._passed(found[distance - step], step)
        return tuple(found.values())

    def products(
        self, pieces: Pieces, *kernels: jax.Array, leaving: bool = False
    ) -> tuple[Pieces, ...]:
        """Multiply all chunks `[B, l, D]` by each kernel `[D, F]`.

        Args:
          pieces: the chunks of the sequence.
          kernels: the kernels, `[D, F]` each.
          leaving: whether the caller passes the results to `reduced`. If true, the farthest chunk
            is multiplied first. If false, the chunks must be from `gathered`, and the nearest chunk
            is multiplied first.

        Returns:
          For each kernel, the products of all chunks, `[B, l, F]`.
        """
        return _products(leaving, pieces, kernels)

    def reduced(self, pieces: Pieces) -> jax.Array:
        """Sum each chunk over the devices of the ring, and return the sum of this device's chunk.

        Args:
          pieces: the chunks `[B, l, ...]` in the order of `gathered`.
        """
        order = distances(len(pieces))
        totals = dict(zip(order, pieces, strict=True))
        for distance in reversed(order[1:]):
            step = 1 if distance > 0 else -1
            totals[distance - step] += self._passed(totals[distance], -step)
        return totals[0]

    def _passed(self, x: jax.Array, step: int) -> jax.Array:
        count = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(x, self.axis, [(i, (i + step) % count) for i in range(count)])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(leaving: bool, pieces: Pieces, kernels: Sequence[jax.Array]) -> tuple[Pieces, ...]:
    def multiply(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.tensordot(x, kernel, 1) for kernel in kernels)

    return tuple(zip(*_one_by_one(multiply, pieces, farthest_first=leaving), strict=True))


def _forward(leaving: bool, pieces: Pieces, kernels: Sequence[jax.Array]) -> Any:
    return _products(leaving, pieces, kernels), (pieces, kernels)


def _backward(leaving: bool, kept: Any, cotangents: Sequence[Pieces]) -> Any:
    pieces, kernels = kept

    def back(grads: Sequence[jax.Array]) -> jax.Array:
        pairs = zip(grads, kernels, strict=True)
        first, *others = (jnp.tensordot(grad, kernel, (-1, 1)) for grad, kernel in pairs)
        return sum(others, first)

    columns = list(zip(*cotangents, strict=True))
    if not leaving:
        # The barrier makes these matmuls wait for `pieces`. Otherwise XLA would send the chunks of
        # `pieces` between these matmuls and the matmuls for the gradients of the kernels.
        pieces, columns[-1] = jax.lax.optimization_barrier((pieces, columns[-1]))
    passed = _one_by_one(back, columns, farthest_first=not leaving)
    return tuple(passed), tuple(_kernel_gradient(pieces, grads) for grads in cotangents)


def _kernel_gradient(pieces: Pieces, grads: Pieces) -> jax.Array:
    rows = (0, 1, 2)
    # The chunks are stacked along a new dim, because a concatenation along a dim that the data axis
    # splits would move elements between devices.
    total, *more = (
        jnp.tensordot(jnp.stack(pieces[part]), jnp.stack(grads[part]), (rows, rows))
        for part in (slice(i, i + MOST_READ) for i in range(0, len(pieces), MOST_READ))
    )
    return sum(more, total)


_products.defvjp(_forward, _backward)


def _one_by_one(
    function: Callable[[Any], Any], pieces: Sequence[Any], *, farthest_first: bool
) -> list[Any]:
    """Apply a function to each chunk in sequence, and return the results in the order of `pieces`.

    Barriers enforce the sequence. Without the barriers, XLA waits for all chunks before the first
    matmul.

    Args:
      function: the function of a chunk.
      pieces: the chunks, the nearest chunk first.
      farthest_first: whether to begin with the last chunk.
    """
    results = list(pieces)
    places = sorted(range(len(pieces)), reverse=farthest_first)
    piece = pieces[places[0]]
    for place, after in zip(places, [*places[1:], None], strict=True):
        found = function(piece)
        if after is not None:
            found, piece = jax.lax.optimization_barrier((found, pieces[after]))
        results[place] = found
    return results
