"""Whole tensors out of their shards, those of stacked layers one layer at a time.

Gathered at once, a stack of all layers needs a second buffer as large as itself before the old one
is free. Layer by layer the new values go into the old buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax

Gather = Callable[[jax.Array, int], jax.Array]
"""(shard, dim that is split) to the whole, inside `jax.shard_map`."""


def gather_into(
    shards: Sequence[jax.Array],
    into: Sequence[jax.Array],
    dims: Sequence[int | None],
    stacked: Sequence[bool],
    gather: Gather,
) -> list[jax.Array]:
    """The whole tensors, inside `jax.shard_map`.

    Args:
      shards: this device's parts.
      into: whole tensors of the same shapes, whose buffers take the result.
      dims: which dim of each is split; None is whole already.
      stacked: whether the first dim counts layers.
    """
    whole = list(into)
    stacks: dict[int, list[int]] = {}
    for i, (shard, dim) in enumerate(zip(shards, dims, strict=True)):
        if dim and stacked[i]:
            stacks.setdefault(shard.shape[0], []).append(i)
        else:
            whole[i] = shard if dim is None else gather(shard, dim)
    for mine in stacks.values():
        filled = _by_layer([(shards[i], whole[i], dims[i] or 0) for i in mine], gather)
        for i, leaf in zip(mine, filled, strict=True):
            whole[i] = leaf
    return whole


def _by_layer(stack: Sequence[tuple[jax.Array, jax.Array, int]], gather: Gather) -> list[jax.Array]:
    """Of (shard, into, dim) with equally many layers."""

    def layer(at: jax.Array, filled: list[jax.Array]) -> list[jax.Array]:
        parts = [lax.dynamic_index_in_dim(shard, at, keepdims=False) for shard, _, _ in stack]
        found = [gather(part, dim - 1) for part, (_, _, dim) in zip(parts, stack, strict=True)]
        return [
            lax.dynamic_update_index_in_dim(old, new, at, 0)
            for old, new in zip(filled, found, strict=True)
        ]

    return lax.fori_loop(0, stack[0][0].shape[0], layer, [into for _, into, _ in stack])
