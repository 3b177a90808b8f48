"""What a model may say of how its activations lie on a mesh, without knowing the mesh.

Dims: B batch, L sequence, l one device's piece of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax


class Ring(Protocol):
    """Devices that pass the pieces of a sequence on, beside the matmuls that need them."""

    @property
    def axis(self) -> str:
        """The mesh axis that they lie on."""
        ...

    def gathered(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The pieces of all devices; x `[B, l, ...]` is this device's."""
        ...

    def products(
        self, pieces: tuple[jax.Array, ...], *kernels: jax.Array, leaving: bool = False
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """For each kernel the products of all pieces, which are to be `reduced` if `leaving`."""
        ...

    def reduced(self, pieces: tuple[jax.Array, ...]) -> jax.Array:
        """This device's piece, summed over all devices."""
        ...


class Hint(Protocol):
    """Says how an activation lies on the mesh: takes it with its dims, returns it constrained.

    `was` gives the dims that x is laid out by so far: if their layout is the same, x is returned
    as it is.
    """

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array: ...

    def parts(self, dim: str) -> int:
        """Into how many parts the mesh splits a dim."""
        ...

    @property
    def ring(self) -> Ring | None:
        """What runs the collectives of an MLP beside its matmuls; None leaves them in one piece."""
        ...

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: tuple[str | None, ...],
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """`function` of each device's blocks of arrays with these dims, each device by itself.

        For what XLA cannot partition. The result lies as the first array does.

        Args:
          axes: the mesh axes whose blocks it sees; None is all.
        """
        ...


@dataclass(frozen=True)
class NoHint:
    """The hint on a single device: x as it is."""

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array:
        """x, whatever its dims."""
        return x

    def parts(self, dim: str) -> int:
        """1."""
        return 1

    @property
    def ring(self) -> None:
        """None."""

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: tuple[str | None, ...],
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """The function: the one block is the array."""
        return function


no_hint = NoHint()

RESIDUAL = ("batch", "residual_seq", "embed")
"""Dims of the residual stream, between blocks; its sequence may be split over a mesh axis.

Sequence parallelism splits it there, where every operation is on single positions.
"""
WITHIN = ("batch", "seq", "embed")
"""Dims of activations inside a block, whose attention needs the whole sequence."""
