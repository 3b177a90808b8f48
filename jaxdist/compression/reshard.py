"""The conversion of the state of a compressed all-reduce to another number of devices.

Each kind of state is converted by another rule:

- The residuals of all senders are errors of the same sum. The residuals are added up, and each new
  sender gets an equal part of the total. EF21's estimates are converted by the same rule, because
  the sum of all estimates is the view of the receivers.
- The state for the shards of a sum is concatenated, and divided into the new number of shards.
- State that is equal on all devices is copied to the new devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.compression.exchange import BucketState
from jaxdist.compression.reduce import CompressionState, GroupState
from jaxdist.errors import CompressionError
from jaxdist.types import Leaf, PyTree


def reshard(
    saved: CompressionState, state: CompressionState, sizes: Sequence[int], axes: Sequence[int]
) -> CompressionState:
    """Convert a state that was saved on a mesh with other axis sizes to the current mesh.

    Args:
      saved: the saved state, arrays [devices of the old mesh, ...].
      state: the shapes of the requested state, [devices of the current mesh, ...].
      sizes: the sizes of the current mesh's axes. The axis across the slowest network comes first.
      axes: the indices of the mesh axes over which messages are sent. All other axes must have the
        same size in the old and in the current mesh.

    Raises:
      CompressionError: the blocks of the gradients on a device have other shapes than before.
    """
    rows = _Rows.of(jax.tree.leaves(saved)[0].shape[0], sizes, axes)
    groups = [
        GroupState(
            jax.tree.map(rows.alike, old.codecs, new.codecs),
            tuple(map(rows.bucket, old.buckets, new.buckets)),
        )
        for old, new in zip(saved.groups, state.groups, strict=True)
    ]
    return CompressionState(
        rows.alike(saved.step, state.step), rows.alike(saved.skipped, state.skipped), tuple(groups)
    )


@dataclass(frozen=True)
class _Rows:
    """The numbers of devices along the message axes, and along the slower and faster mesh axes.

    Attributes:
      before: the number of devices along the axes that are slower than the message axes.
      old, new: the number of devices along the message axes, in the saved and the current mesh.
      after: the number of devices along the axes that are faster than the message axes.
    """

    before: int
    old: int
    new: int
    after: int

    @classmethod
    def of(cls, saved: int, sizes: Sequence[int], axes: Sequence[int]) -> _Rows:
        first, last = min(axes), max(axes)
        before, after = math.prod(sizes[:first]), math.prod(sizes[last + 1 :])
        if list(axes) != list(range(first, last + 1)) or saved % (before * after):
            raise CompressionError(
                f"the compression state of {saved} devices cannot be resharded for "
                f"{math.prod(sizes)} devices: resume with {saved} devices, or start a new run"
            )
        return cls(before, saved // (before * after), math.prod(sizes[first : last + 1]), after)

    def bucket(self, old: BucketState, new: BucketState) -> BucketState:
        shards = bool(jax.tree.leaves(new.down))
        sizes = [leaf.shape[1:] for leaf in jax.tree.leaves(new.up)]
        size = math.prod(sizes[0]) if sizes else 0

        def cut(old: jax.Array, new: Leaf) -> jax.Array:
            return self._cut(old, new, size)

        return BucketState(
            jax.tree.map(self.shared, old.up, new.up),
            jax.tree.map(cut if shards else self.alike, old.up_view, new.up_view),
            jax.tree.map(cut, old.down, new.down),
            jax.tree.map(self.alike, old.down_view, new.down_view),
            jax.tree.map(self.alike, old.common, new.common),
        )

    def alike(self, old: jax.Array, new: Leaf) -> jax.Array:
        """Copy state that is equal on all devices to the devices of the current mesh."""
        return self._moved(old, new, lambda rows: jnp.broadcast_to(rows[:1], self._to(rows)))

    def shared(self, old: jax.Array, new: Leaf) -> jax.Array:
        """Sum the state over the old devices, and return an equal part for each new device."""

        def share(rows: jax.Array) -> jax.Array:
            return jnp.broadcast_to(rows.sum(0, keepdims=True) / self.new, self._to(rows))

        return self._moved(old, new, share)

    def _cut(self, old: jax.Array, new: Leaf, size: int) -> jax.Array:
        """Concatenate the shards of the old devices, and divide the result among new devices."""

        def cut(rows: jax.Array) -> jax.Array:
            filled = self.new * new.shape[1]
            return jnp.pad(rows.reshape(-1)[:size], (0, filled - size)).reshape(self.new, -1)

        return self._moved(old, new, cut, cut=True)

    def _to(self, rows: jax.Array) -> tuple[int, ...]:
        return (self.new, *rows.shape[1:])

    def _moved(
        self, old: jax.Array, new: Any, move: Callable[[jax.Array], PyTree], cut: bool = False
    ) -> jax.Array:
        if not cut and old.shape[1:] != new.shape[1:]:
            raise CompressionError(
                f"the compression state was saved with blocks of shape {old.shape[1:]}, but the "
                f"config needs blocks of shape {new.shape[1:]}: resume with the config of the "
                "save, or start a new run"
            )
        rows = old.reshape(self.before, self.old, self.after, *old.shape[1:])
        each = jax.vmap(jax.vmap(move, in_axes=1, out_axes=1))
        moved = each(rows).reshape(new.shape)
        return moved.astype(new.dtype)
