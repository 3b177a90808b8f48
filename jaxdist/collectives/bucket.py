"""Tensor fusion: one collective for many small tensors (Sergeev and Del Balso, 1802.05799, 3.3).

For a collective of a few kilobytes latency is the whole cost. Leaves are therefore packed into flat
buckets, a collective runs on each bucket, and the leaves are cut out of its result. A bucket can be
sent when its last leaf is computed, so leaves are packed in the reverse order of their use, because
the backward pass computes the gradient of the last layer first. `split.py` packs the shards of a
layer by the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.collectives.algorithms.auto import Auto, here_kind
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.axis import Axis, CollectiveError, checked
from jaxdist.collectives.contract import Algorithm, Operation
from jaxdist.collectives.operations import Op, all_reduce
from jaxdist.trees import leaf_bytes
from jaxdist.types import Leaf, TreeT

BUCKET_BYTES = 32 * 2**20
"""The size of a bucket for `bucket_bytes: auto`, for which latency is negligible on known links."""


def reduce_tree(
    tree: TreeT,
    axis: Axis,
    *,
    op: Op = "sum",
    algorithm: Algorithm,
    order: Sequence[int] | None = None,
) -> TreeT:
    """All-reduce every leaf of `tree`, packed into buckets of `algorithm.bucket_bytes`.

    Args:
      tree: arrays or scalars of this device, inside `jax.shard_map`.
      axis, op: as for `all_reduce`.
      algorithm: the algorithm, whose `bucket_bytes` is the size of a bucket. The size "auto" is 32
        MiB; but where the algorithm is `Xla`, or `Auto` chooses `Xla`, each leaf is sent
        separately, because XLA merges collectives itself, unless `sends_apart`.
      order: positions of the leaves (in the order of `jax.tree.leaves`), in the order in which they
        are computed; None means from the last leaf to the first.

    Returns:
      A tree like `tree`.

    Raises:
      CollectiveError: as for `all_reduce`, or `order` is not a permutation of the leaves.
    """
    axis = checked(axis, "reduce_tree")
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    reduced: dict[int, jax.Array] = {}
    for bucket in plan_buckets(arrays, fusion_bytes(algorithm), order):
        packed = [arrays[index] for index in bucket]
        if fuses(algorithm, "all_reduce", axis, sum(map(leaf_bytes, packed))):
            flat = all_reduce(pack(packed), axis, op=op, algorithm=algorithm)
            results = unpack(flat, packed)
        else:
            results = [all_reduce(leaf, axis, op=op, algorithm=algorithm) for leaf in packed]
        reduced |= zip(bucket, results, strict=True)
    return jax.tree.unflatten(structure, [reduced[index] for index in range(len(arrays))])


def fusion_bytes(algorithm: Algorithm) -> int | None:
    """Return the bytes of a bucket, with "auto" resolved, or None if each leaf is sent separately.

    >>> fusion_bytes(Xla()), fusion_bytes(Xla(bucket_bytes=1024))
    (None, 1024)
    """
    if algorithm.bucket_bytes == "auto":
        return None if isinstance(algorithm, Xla) and not sends_apart() else BUCKET_BYTES
    return algorithm.bucket_bytes


def sends_apart() -> bool:
    """Return whether XLA sends the arrays of a collective separately, each with its own latency.

    XLA does so over gloo, between processes on CPUs, where a message of a few bytes takes as long
    as a message of a megabyte.
    """
    return here_kind() == "cpu" and jax.process_count() > 1


def plan_buckets(
    leaves: Sequence[Leaf], bucket_bytes: int | None, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the positions of the leaves of each bucket, in the order of the buckets' completion.

    A bucket holds leaves of one dtype, in order, up to `bucket_bytes`; a larger leaf has a bucket
    of its own. If `bucket_bytes` is None, each leaf has a bucket of its own.

    >>> leaves = [np.zeros(2, "float32"), np.zeros(9, "float32"), np.zeros(3, "int8")]
    >>> plan_buckets([*leaves, *leaves], bucket_bytes=16)
    [[4], [1], [5, 2], [3, 0]]

    Raises:
      CollectiveError: `order` is not a permutation of the leaves.
    """
    positions = _positions(len(leaves), order)
    if bucket_bytes is None:
        return [[index] for index in positions]
    full: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], int]] = {}
    for index in positions:
        dtype, size_bytes = np.dtype(leaves[index].dtype), leaf_bytes(leaves[index])
        bucket, used_bytes = filling.pop(dtype, ([], 0))
        if size_bytes > bucket_bytes:
            full.append([index])
            size_bytes = 0
        elif used_bytes + size_bytes > bucket_bytes:
            full.append(bucket)
            bucket, used_bytes = [index], 0
        else:
            bucket = [*bucket, index]
        # The bucket becomes the last entry of `filling`: the bucket that grew last is complete
        # last.
        if bucket:
            filling[dtype] = bucket, used_bytes + size_bytes
    return full + [bucket for bucket, _ in filling.values()]


def pack(leaves: Sequence[jax.Array]) -> jax.Array:
    """Concatenate leaves of one dtype; a single leaf is only reshaped."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    # A concatenation of a single array may remain a copy in the compiled program.
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def unpack(flat: jax.Array, like: Sequence[Leaf]) -> list[jax.Array]:
    """Invert `pack`: cut `flat` into parts with the shapes of `like`."""
    ends = np.cumsum([leaf.size for leaf in like])
    return [
        flat[end - leaf.size : end].reshape(leaf.shape)
        for leaf, end in zip(like, ends, strict=True)
    ]


def fuses(algorithm: Algorithm, kind: Operation, axis: Axis, payload_bytes: int) -> bool:
    """Return whether a bucket is packed into one array, which XLA's own collectives do not need."""
    if isinstance(algorithm, Auto) and algorithm.bucket_bytes == "auto" and not sends_apart():
        return not isinstance(algorithm.choose_here(kind, payload_bytes, axis), Xla)
    return True


def _positions(count: int, order: Sequence[int] | None) -> Sequence[int]:
    if order is None:
        return range(count - 1, -1, -1)
    if sorted(order) != list(range(count)):
        raise CollectiveError(
            f"order {list(order)} of reduce_tree is not a permutation of the tree's {count} "
            f"leaves: give each position from 0 to {count - 1} once"
        )
    return order
