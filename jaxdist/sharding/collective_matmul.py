"""Matmuls over a tensor axis that overlap with their collectives, piece by piece.

Where the sequence of the residual stream is split over the axis, an MLP begins with an all-gather
of its input and ends with a reduce-scatter of its result. This module passes each device's piece of
the sequence around a ring instead: a device multiplies the pieces that it has while the next pieces
arrive, and partial sums are added up on their way back (Wang et al., "Overlap Communication with
Dependent Computation via Decomposition", ASPLOS 2023).

Devices process pieces in the order of arrival, which differs between devices, and never reorder
them, because an MLP does not depend on the order of the sequence, and reordering would copy data.
The gradient of a kernel is a single matmul over several pieces, because XLA would all-reduce a
separate gradient of each piece over the data axis.

Dims: B batch, L sequence, D embed, F mlp, n devices on the ring, l = L/n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Pieces = tuple[jax.Array, ...]
"""A sequence in pieces `[B, l, ...]`, in the order of the distances that `distances` returns."""

MOST_READ = 4
"""The largest number of stacked pieces that XLA:TPU reads inside a matmul without copying them."""


def distances(count: int) -> list[int]:
    """Return the signed number of hops that each piece travels on a ring, the nearest piece first.

    >>> distances(5), distances(4)
    ([0, 1, -1, 2, -2], [0, 1, -1, 2])
    """
    return sorted(range(-((count - 1) // 2), count // 2 + 1), key=lambda d: (abs(d), d < 0))


@dataclass(frozen=True)
class AxisRing:
    """A ring of the devices of a mesh axis, for use in a `jax.shard_map` manual on the axis."""

    axis: str

    def gathered(self, x: jax.Array) -> Pieces:
        """Gather the pieces of all devices, given this device's piece `x [B, l, ...]`."""
        count = jax.lax.axis_size(self.axis)
        found = {0: x}
        for distance in distances(count)[1:]:
            step = 1 if distance > 0 else -1
            found[distance] = self._passed(found[distance - step], step)
        return tuple(found.values())

    def products(
        self, pieces: Pieces, *kernels: jax.Array, leaving: bool = False
    ) -> tuple[Pieces, ...]:
        """Multiply all pieces `[B, l, D]` by each kernel `[D, F]`, in their dtype.

        Args:
          leaving: whether `reduced` follows, so that the farthest piece is multiplied first; else
            the pieces come from `gathered`, and the nearest piece is multiplied first.
        """
        return _products(leaving, pieces, kernels)

    def reduced(self, pieces: Pieces) -> jax.Array:
        """Sum each piece over the devices of the ring; return this device's sum `[B, l, ...]`."""
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
        # By this barrier the pieces of another gather travel before these matmuls, not between
        # these matmuls and the following matmuls.
        pieces, columns[-1] = jax.lax.optimization_barrier((pieces, columns[-1]))
    passed = _one_by_one(back, columns, farthest_first=not leaving)
    return tuple(passed), tuple(_kernel_gradient(pieces, grads) for grads in cotangents)


def _kernel_gradient(pieces: Pieces, grads: Pieces) -> jax.Array:
    rows = (0, 1, 2)
    # The pieces are stacked in a new dim, because a concatenation along a dim that the data axis
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
    """Apply a function to each piece, one after another.

    A barrier forces the order on XLA, which otherwise waits for all pieces before the first matmul.
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
