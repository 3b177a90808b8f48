"""The interface by which a model describes the layout of its activations without knowing the mesh.

Dims: B batch, L sequence, l the part of the sequence on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxdist.cost.context import SequenceSplit


class SequenceRing(Protocol):
    """A ring of devices that pass parts of a sequence around while matmuls use the parts."""

    @property
    def axis(self) -> str:
        """The mesh axis of the ring's devices."""
        ...

    def gathered(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return the parts of all devices, given this device's part x `[B, l, ...]`."""
        ...

    def products(
        self, pieces: tuple[jax.Array, ...], *kernels: jax.Array, leaving: bool = False
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """Return, for each kernel, the products of all parts with the kernel.

        Args:
          leaving: whether the products will be passed to `reduced`.
        """
        ...

    def reduced(self, pieces: tuple[jax.Array, ...]) -> jax.Array:
        """Sum the parts over all devices, and return this device's part of the sum."""
        ...


class Hint(Protocol):
    """A function that returns an activation in the layout of the given dims.

    `was` names the dims of x's current layout. If the current and the wanted layout are the same on
    the mesh, x is returned unchanged. The bodies of the methods suit a single device, where nothing
    is split.
    """

    def __call__(
        self, x: jax.Array, *dims: str | None, was: tuple[str | None, ...] | None = None
    ) -> jax.Array:
        """Return x in the layout of the dims."""
        return x

    def parts(self, dim: str) -> int:
        """Return the number of parts into which the mesh splits a dim."""
        return 1

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the mesh axes that split a dim, or () if no axis splits the dim."""
        return ()

    @property
    def ring(self) -> SequenceRing | None:
        """The ring of devices that overlaps the collectives and the matmuls of an MLP.

        The value is None if `sharding.collective_matmul` is not set.
        """

    @property
    def split(self) -> SequenceSplit | None:
        """The method by which devices share a sequence's attention, or None if they share none.

        The order of positions applies only to batches with `positions`; other batches are in the
        order of the text.
        """

    def on_blocks(
        self,
        function: Callable[..., jax.Array],
        *dims: tuple[str | None, ...],
        axes: Sequence[str] | None = None,
    ) -> Callable[..., jax.Array]:
        """Return a function that each device applies to its shards only, without collectives.

        The function may use operations that XLA cannot partition. The result has the layout of the
        first array.

        Args:
          function: a function from the shards of arrays to a shard of the result.
          dims: the dims of each array.
          axes: the mesh axes along which the function sees shards, or None for all axes.
        """
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
        """Send tokens to the devices that hold their experts, and return the results `[B, L, D]`.

        Args:
          compute: a function of tokens `[T, D]`, the numbers and weights of their experts, `[T, k]`
            each, and the kernels of the device's experts. The function counts these experts from 0,
            and skips every number that is too large.
          kernels: pairs of a kernel's dims and the kernel; the first dim counts experts.
          capacity: the largest number of tokens of a sequence that an expert processes, or None
            without a limit.
        """
        del capacity
        tokens = (x.reshape(-1, x.shape[-1]) for x in (x_BLD, ids_BLk, weights_BLk))
        return compute(*tokens, *(kernel for _, kernel in kernels)).reshape(x_BLD.shape)


@dataclass(frozen=True)
class NoHint(Hint):
    """The hint on a single device, which leaves x unchanged."""


no_hint = NoHint()

RESIDUAL = ("batch", "residual_seq", "embed")
"""The dims of the residual stream between blocks.

Sequence parallelism splits the sequence there, because operations between blocks treat each
position separately.
"""
WITHIN = ("batch", "seq", "embed")
"""The dims of activations inside a block, where attention needs the whole sequence."""
