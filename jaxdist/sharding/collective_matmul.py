"""Matmuls over a tensor axis that overlap with their collectives, piece by piece.

Where the sequence of the residual stream is split over the axis, an MLP begins with an all-gather
of its input and ends with a reduce-scatter of its result. Here each device's piece of the sequence
travels around the ring instead: a device multiplies the pieces that it has while the next arrive,
and partial sums are added up on their way back (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition", ASPLOS 2023).

Devices work on pieces in the order of their arrival, which differs between devices, and never
reorder them: an MLP does not depend on the order, and nothing is copied. The gradient of a kernel
is a single matmul over several pieces: XLA would reduce a gradient of each piece over the data
axis.

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
"""A sequence in pieces `[B, l, ...]`, nearest first: see `distances`."""

MOST_READ = 4
"""Pieces that XLA:TPU reads within a matmul; it would first copy a larger number together."""


def distances(count: int) -> list[int]:
    """Return how many places each piece travels, nearest first; negative is the other direction.

    >>> distances(5), distances(4)
    ([0, 1, -1, 2, -2], [0, 1, -1, 2])
    """
    return sorted(range(-((count - 1) // 2), count // 2 + 1), key=lambda d: (abs(d), d < 0))


@dataclass(frozen=True)
class AxisRing:
    """The devices of a mesh axis, in order; the axis is manual where the methods are called."""

    axis: str

    def gathered(self, x: jax.Array) -> Pieces:
        """Gather the pieces of all devices; `x [B, l, ...]` is this device's."""
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
          leaving: whether the products return to their devices; otherwise the pieces come from
            there.
        """
        return _products(leaving, pieces, kernels)

    def reduced(self, pieces: Pieces) -> jax.Array:
        """Sum the pieces over the ring, and return this device's `[B, l, ...]`."""
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
        # Pieces of another gather travel before these matmuls, not between them and the next.
        pieces, columns[-1] = jax.lax.optimization_barrier((pieces, columns[-1]))
    passed = _one_by_one(back, columns, farthest_first=not leaving)
    return tuple(passed), tuple(_kernel_gradient(pieces, grads) for grads in cotangents)


def _kernel_gradient(pieces: Pieces, grads: Pieces) -> jax.Array:
    rows = (0, 1, 2)
    # In a new dim: along a dim that the data axis splits, concatenated pieces would change devices.
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
