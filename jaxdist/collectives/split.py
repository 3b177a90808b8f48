"""Tensor fusion for sharded tensors: gather or reduce-scatter several tensors at once.

Shards of one dtype are concatenated in a bucket, whichever dim of each tensor is split, so that a
layer of many small tensors is one message instead of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.collectives.axis import Axis, axis_size, checked
from jaxdist.collectives.bucket import fuses, fusion_bytes, plan_buckets, unpack
from jaxdist.collectives.check import array, check_algorithm, check_counts, dim_of, gathered_size
from jaxdist.collectives.contract import Algorithm, Operation
from jaxdist.collectives.operations import all_gather, into_blocks, reduce_scatter
from jaxdist.trees import leaf_bytes


def gather_leaves(
    shards: Sequence[jax.Array],
    dims: Sequence[int],
    axis: Axis,
    *,
    lengths: Sequence[int | None] | None = None,
    algorithm: Algorithm,
) -> list[jax.Array]:
    """Run `all_gather` on every shard, packed into buckets of `algorithm.bucket_bytes`.

    The size of a bucket is that of its whole tensors, after the gather.

    Args:
      shards: the shards of this device, inside `jax.shard_map`.
      dims: the split dim of each shard.
      axis, algorithm: as for `reduce_tree`.
      lengths: the `size` argument of `all_gather` for each shard.

    Returns:
      The whole tensors.

    Raises:
      CollectiveError: as for `all_gather`, or there are more or fewer dims or lengths than shards.
    """
    axis = checked(axis, "gather_leaves")
    count = axis_size(axis)
    shards, dims = _checked(shards, dims, algorithm, "gather_leaves")
    given = [None] * len(shards) if lengths is None else lengths
    check_counts(len(shards), given, "lengths", "gather_leaves")
    sizes = [
        gathered_size(size, count * shard.shape[dim], axis, "gather_leaves")
        for shard, dim, size in zip(shards, dims, given, strict=True)
    ]

    def one_by_one(i: int) -> jax.Array:
        return all_gather(shards[i], axis, dim=dims[i], size=sizes[i], algorithm=algorithm)

    def together(bucket: list[int]) -> list[jax.Array]:
        rows = [jnp.moveaxis(shards[i], dims[i], 0) for i in bucket]
        flat = jnp.concatenate([row.reshape(-1) for row in rows])
        blocks = all_gather(flat[None], axis, algorithm=algorithm)
        mine = [dims[i] for i in bucket], [sizes[i] for i in bucket]
        return join_shards(blocks, [row.shape for row in rows], *mine)

    wholes = [jax.ShapeDtypeStruct((count, *shard.shape), shard.dtype) for shard in shards]
    return _in_buckets("all_gather", wholes, axis, algorithm, one_by_one, together)


def scatter_leaves(
    tensors: Sequence[jax.Array], dims: Sequence[int], axis: Axis, *, algorithm: Algorithm
) -> list[jax.Array]:
    """Run `reduce_scatter` on every tensor, packed into buckets of `algorithm.bucket_bytes`.

    Args:
      tensors: the tensors of this device, inside `jax.shard_map`.
      dims: the dim of each tensor along which its sum is split.
      axis, algorithm: as for `reduce_tree`.

    Returns:
      This device's shards of the sums.

    Raises:
      CollectiveError: as for `reduce_scatter`, or there are more or fewer dims than tensors.
    """
    axis = checked(axis, "scatter_leaves")
    size = axis_size(axis)
    tensors, dims = _checked(tensors, dims, algorithm, "scatter_leaves")

    def one_by_one(i: int) -> jax.Array:
        return reduce_scatter(tensors[i], axis, dim=dims[i], algorithm=algorithm)

    def together(bucket: list[int]) -> list[jax.Array]:
        blocks = [into_blocks(tensors[i], dims[i], size) for i in bucket]
        flat = jnp.concatenate([block.reshape(size, -1) for block in blocks], axis=1)
        own = reduce_scatter(flat, axis, algorithm=algorithm)[0]
        shards = unpack(own, [jax.eval_shape(lambda b: b[0], block) for block in blocks])
        return [jnp.moveaxis(s, 0, dims[i]) for i, s in zip(bucket, shards, strict=True)]

    return _in_buckets("reduce_scatter", tensors, axis, algorithm, one_by_one, together)


def _checked(
    leaves: Sequence[ArrayLike], dims: Sequence[int], algorithm: Algorithm, operation: str
) -> tuple[list[jax.Array], list[int]]:
    check_algorithm(algorithm, operation)
    check_counts(len(leaves), dims, "dims", operation)
    arrays = [array(leaf, operation) for leaf in leaves]
    return arrays, [dim_of(d, x, "dim", operation) for d, x in zip(dims, arrays, strict=True)]


def _in_buckets(
    kind: Operation,
    payload: Sequence[jax.Array | jax.ShapeDtypeStruct],
    axis: Axis,
    algorithm: Algorithm,
    one_by_one: Callable[[int], jax.Array],
    together: Callable[[list[int]], list[jax.Array]],
) -> list[jax.Array]:
    found: dict[int, jax.Array] = {}
    for bucket in plan_buckets(payload, fusion_bytes(algorithm)):
        size_bytes = sum(leaf_bytes(payload[i]) for i in bucket)
        fused = len(bucket) > 1 and fuses(algorithm, kind, axis, size_bytes)
        found |= zip(bucket, together(bucket) if fused else map(one_by_one, bucket), strict=True)
    return [found[i] for i in range(len(payload))]


def join_shards(
    blocks: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    lengths: Sequence[int],
) -> list[jax.Array]:
    """Join whole tensors from concatenated shards.

    Args:
      blocks: array [N, total], each row with the flat shards of a device, whose split dim is first.
      shapes: shapes of the shards in a row, the split dim first.
      dims: the split dim of each tensor.
      lengths: the length of each tensor's split dim; padding of the shards beyond it is dropped.
    """
    like = [jax.ShapeDtypeStruct((math.prod(shape),), blocks.dtype) for shape in shapes]
    parts = jax.vmap(partial(unpack, like=like))(blocks)
    wholes = [
        part.reshape(len(part) * shape[0], *shape[1:])
        for part, shape in zip(parts, shapes, strict=True)
    ]
    cut = zip(wholes, dims, lengths, strict=True)
    return [jnp.moveaxis(rows[:length], 0, dim) for rows, dim, length in cut]
