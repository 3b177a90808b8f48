"""The interface by which a model describes the layout of its activations without knowing the mesh.

Dims: B batch, L sequence, l a device's piece of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxdist.cost.context import SequenceSplit


class SequenceRing(Protocol):
    """Devices that pass the pieces of a sequence around, while matmuls use them."""

    @property
    def axis(self) -> str:
        """The mesh axis of these devices."""
        ...

    def gathered(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Gather the pieces of all devices; x `[B, l, ...]` is this device's piece."""
        ...

    def products(
        self, pieces: tuple[jax.Array, ...], *kernels: jax.Array, leaving: bool = False
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """Multiply all pieces by each kernel; `leaving` states that `reduced` sums the products."""
        ...

    def reduced(self, pieces: tuple[jax.Array, ...]) -> jax.Array:
        """Sum the pieces over all devices, and return this device's piece of the sum."""
        ...


class Hint(Protocol):
    """A function that constrains the layout of an activation with the given dims, and returns it.

    `was` gives the dims of x's current layout: if the layout is the same, x is returned unchanged.
    """

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array: ...

    def parts(self, dim: str) -> int:
        """Return the number of parts into which the mesh splits a dim."""
        ...

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the mesh axes that split a dim, or () where none does."""
        ...

    @property
    def ring(self) -> SequenceRing | None:
        """The ring that overlaps an MLP's collectives with its matmuls; None overlaps nothing."""
        ...

    @property
    def split(self) -> SequenceSplit | None:
        """The method by which devices share a sequence's attention, or None without sharing.

        The order applies to batches with `positions`; other batches are in the order of the text.
        """
        ...

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: tuple[str | None, ...],
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """Map `function` over each device's blocks of arrays with these dims, without collectives.

        XLA cannot partition some operations otherwise. The result has the layout of the first
        array.

        Args:
          axes: the mesh axes whose blocks the function sees, or None for all axes.
        """
        ...

    def over_experts(
        self,
        compute: Callable[..., jax.Array],
        x_BLD: jax.Array,
        ids_BLk: jax.Array,
        weights_BLk: jax.Array,
        *kernels: tuple[tuple[str | None, ...], jax.Array],
        capacity: int | None,
    ) -> jax.Array:
        """Compute experts where their kernels are, which tokens are brought to; return `[B, L, D]`.

        Args:
          compute: function of tokens `[T, D]`, numbers of experts and their weights `[T, k]`, and
            the kernels of some experts, whose numbers begin at 0; larger numbers belong to others.
          kernels: pairs of dims, the first of which counts experts, and a kernel.
          capacity: the largest number of tokens of a sequence for an expert; None sets no limit.
        """
        ...


@dataclass(frozen=True)
class NoHint:
    """The hint on a single device, which leaves x unchanged."""

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array:
        """Return x unchanged, for any dims."""
        return x

    def parts(self, dim: str) -> int:
        """Return 1."""
        return 1

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return (), because a single device splits nothing."""
        return ()

    @property
    def ring(self) -> None:
        """None: a single device has no ring."""

    @property
    def split(self) -> None:
        """None: a single device has whole sequences."""

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: tuple[str | None, ...],
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """Return the function itself, because the only block is the whole array."""
        return function

    def over_experts(
        self,
        compute: Callable[..., jax.Array],
        x_BLD: jax.Array,
        ids_BLk: jax.Array,
        weights_BLk: jax.Array,
        *kernels: tuple[tuple[str | None, ...], jax.Array],
        capacity: int | None,
    ) -> jax.Array:
        """Compute all experts for all tokens here."""
        del capacity
        tokens = (x.reshape(-1, x.shape[-1]) for x in (x_BLD, ids_BLk, weights_BLk))
        return compute(*tokens, *(kernel for _, kernel in kernels)).reshape(x_BLD.shape)


no_hint = NoHint()

RESIDUAL = ("batch", "residual_seq", "embed")
"""Dims of the residual stream, between blocks; its sequence may be split over a mesh axis.

Sequence parallelism splits the sequence between blocks, where operations are on single positions.
"""
WITHIN = ("batch", "seq", "embed")
"""Dims of activations inside a block, whose attention needs the whole sequence."""
