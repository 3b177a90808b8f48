"""Tensor fusion for sharded tensors: the gather or reduce-scatter of several tensors together.

Shards of one dtype are concatenated in a bucket, although different dims of the tensors may be
split. A layer of many small tensors is then one message instead of many messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.collectives.axis import Axis, axis_size, checked
from jaxdist.collectives.bucket import fuses, fusion_bytes, in_buckets, plan_buckets, unpack
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
    """Gather whole tensors from their shards, packed into buckets of `algorithm.bucket_bytes`.

    The bytes of a bucket are the bytes of its whole tensors, after the gather.

    Args:
      shards: the shards of this device, inside `jax.shard_map`.
      dims: the split dim of each tensor.
      axis: the name of a mesh axis, or a tuple of names.
      lengths: for each tensor, the number of elements of its split dim to keep, or None to keep all
        of them. If the argument is None, all elements of all tensors are kept.
      algorithm: the algorithm, whose `bucket_bytes` is used as in `reduce_tree`.

    Returns:
      The whole tensors.

    Raises:
      CollectiveError: an argument is invalid, as in `all_gather`, or the number of dims or lengths
        differs from the number of shards.
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
    return _fused("all_gather", wholes, axis, algorithm, one_by_one, together)


def scatter_leaves(
    tensors: Sequence[jax.Array], dims: Sequence[int], axis: Axis, *, algorithm: Algorithm
) -> list[jax.Array]:
    """Sum tensors over devices into shards, packed into buckets of `algorithm.bucket_bytes`.

    Args:
      tensors: the tensors of this device, inside `jax.shard_map`.
      dims: the dim of each tensor along which its sum is split.
      axis: the name of a mesh axis, or a tuple of names.
      algorithm: the algorithm, whose `bucket_bytes` is used as in `reduce_tree`.

    Returns:
      This device's shards of the sums, padded as by `reduce_scatter`.

    Raises:
      CollectiveError: an argument is invalid, as in `reduce_scatter`, or the number of dims differs
        from the number of tensors.
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

    return _fused("reduce_scatter", tensors, axis, algorithm, one_by_one, together)


def _checked(
    leaves: Sequence[ArrayLike], dims: Sequence[int], algorithm: Algorithm, operation: str
) -> tuple[list[jax.Array], list[int]]:
    check_algorithm(algorithm, operation)
    check_counts(len(leaves), dims, "dims", operation)
    arrays = [array(leaf, operation) for leaf in leaves]
    return arrays, [dim_of(d, x, "dim", operation) for d, x in zip(dims, arrays, strict=True)]


def _fused(
    kind: Operation,
    payload: Sequence[jax.Array | jax.ShapeDtypeStruct],
    axis: Axis,
    algorithm: Algorithm,
    one_by_one: Callable[[int], jax.Array],
    together: Callable[[list[int]], list[jax.Array]],
) -> list[jax.Array]:
    def sent(bucket: list[int]) -> Iterable[jax.Array]:
        size_bytes = sum(leaf_bytes(payload[i]) for i in bucket)
        fused = len(bucket) > 1 and fuses(algorithm, kind, axis, size_bytes)
        return together(bucket) if fused else map(one_by_one, bucket)

    return in_buckets(sent, plan_buckets(payload, fusion_bytes(algorithm)))


def join_shards(
    blocks: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    lengths: Sequence[int],
) -> list[jax.Array]:
    """Join whole tensors from the concatenated shards of all N devices.

    Args:
      blocks: an array [N, total]. Each row has the shards of a device. The split dim of each shard
        is moved to the front, and the shards are flattened and concatenated.
      shapes: the shapes of the shards in a row, with the split dim first.
      dims: the split dim of each tensor.
      lengths: the length of each tensor's split dim without the padding of shards.
    """
    like = [jax.ShapeDtypeStruct((math.prod(shape),), blocks.dtype) for shape in shapes]
    parts = jax.vmap(partial(unpack, like=like))(blocks)
    wholes = [
        part.reshape(len(part) * shape[0], *shape[1:])
        for part, shape in zip(parts, shapes, strict=True)
    ]
    cut = zip(wholes, dims, lengths, strict=True)
    return [jnp.moveaxis(rows[:length], 0, dim) for rows, dim, length in cut]
