"""Matmuls over a tensor axis whose collectives run beside them, piece by piece.

Where the sequence of the residual stream is split over the axis, an MLP begins with an all-gather
of its input and ends with a reduce-scatter of its result. Here each device's piece of the sequence
goes round the ring instead: a device multiplies what it has while the next pieces travel, and
partial sums are added up on their way back (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition", ASPLOS 2023).

Devices work on pieces in the order in which they arrive, each in another one, and never put them
in order: an MLP does not care, and nothing is copied. The gradient of a kernel is a matmul over
several pieces: one of each piece XLA would reduce over the data axis.

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
"""Pieces that XLA:TPU reads within one matmul; it copies more than these together first."""


def distances(count: int) -> list[int]:
    """How many places each piece comes from, nearest first; negative ones go round the other way.

    >>> distances(5), distances(4)
    ([0, 1, -1, 2, -2], [0, 1, -1, 2])
    """
    return sorted(range(-((count - 1) // 2), count // 2 + 1), key=lambda d: (abs(d), d < 0))


@dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis, manual where the methods are called, one after another."""

    axis: str

    def gathered(self, x: jax.Array) -> Pieces:
        """The pieces of all devices; `x [B, l, ...]` is this device's."""
        count = jax.lax.axis_size(self.axis)
        found = {0: x}
        for distance in distances(count)[1:]:
            step = 1 if distance > 0 else -1
            found[distance] = self._passed(found[distance - step], step)
        return tuple(found.values())

    def products(
        self, pieces: Pieces, *kernels: jax.Array, leaving: bool = False
    ) -> tuple[Pieces, ...]:
        """For each kernel `[D, F]` the products of all pieces `[B, l, D]`, in their dtype.

        Args:
          leaving: the products go back to their devices, where else the pieces come from there.
        """
        return _products(leaving, pieces, kernels)

    def reduced(self, pieces: Pieces) -> jax.Array:
        """This device's piece `[B, l, ...]`, summed over the ring."""
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
        # Pieces that are gathered anew travel before these matmuls, not between them and the next.
        pieces, columns[-1] = jax.lax.optimization_barrier((pieces, columns[-1]))
    passed = _one_by_one(back, columns, farthest_first=not leaving)
    return tuple(passed), tuple(_kernel_gradient(pieces, grads) for grads in cotangents)


def _kernel_gradient(pieces: Pieces, grads: Pieces) -> jax.Array:
    rows = (0, 1, 2)
    # On a dim of their own: along one that the data axis splits they would change devices.
    total, *more = (
        jnp.tensordot(jnp.stack(pieces[part]), jnp.stack(grads[part]), (rows, rows))
        for part in (slice(i, i + MOST_READ) for i in range(0, len(pieces), MOST_READ))
    )
    return sum(more, total)


_products.defvjp(_forward, _backward)


def _one_by_one(
    function: Callable[[Any], Any], pieces: Sequence[Any], *, farthest_first: bool
) -> list[Any]:
    """A function of each piece, one after another.

    XLA is held to the order: left alone it waits for all pieces before it multiplies the first.
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
