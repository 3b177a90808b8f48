"""Tensor fusion: a single collective for many small tensors.

The source is Sergeev and Del Balso, arXiv 1802.05799, section 3.3. The cost of a collective of a
few kilobytes is its latency. Leaves are therefore packed into flat buckets, and a collective runs
on each bucket. A bucket can be sent when its last leaf is computed. The backward pass computes the
gradient of the last layer first, so leaves are packed from the last to the first. `split.py` packs
the shards of tensors by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
"""The bytes of a bucket for `bucket_bytes: auto`. On all known links, the latency of a message of
this size is negligible."""


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
      tree: the arrays or scalars of this device, inside `jax.shard_map`.
      axis: the name of a mesh axis, or a tuple of names.
      op: "sum", "mean", "max" or "min", as in `all_reduce`.
      algorithm: the algorithm, whose `bucket_bytes` is the size of a bucket. The size "auto" is 32
        MiB. There is an exception for "auto" if the algorithm is `Xla`, or is `Auto` and chooses
        `Xla`: each leaf is sent separately, because XLA merges collectives itself. The exception
        does not apply if `sends_apart()` is true.
      order: the indices of the leaves (in the order of `jax.tree.leaves`), in the order in which
        the leaves are computed, or None for the order from the last leaf to the first.

    Returns:
      A tree like `tree`, with the same values on all devices.

    Raises:
      CollectiveError: an argument is invalid, as in `all_reduce`, or `order` is not a permutation
        of the leaves.
    """
    axis = checked(axis, "reduce_tree")
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]

    def reduced(bucket: list[int]) -> list[jax.Array]:
        packed = [arrays[index] for index in bucket]
        if fuses(algorithm, "all_reduce", axis, sum(map(leaf_bytes, packed))):
            return unpack(all_reduce(pack(packed), axis, op=op, algorithm=algorithm), packed)
        return [all_reduce(leaf, axis, op=op, algorithm=algorithm) for leaf in packed]

    buckets = plan_buckets(arrays, fusion_bytes(algorithm), order)
    return jax.tree.unflatten(structure, in_buckets(reduced, buckets))


def fusion_bytes(algorithm: Algorithm) -> int | None:
    """Return the bucket size of an algorithm in bytes, or None if each leaf is sent separately.

    >>> fusion_bytes(Xla()), fusion_bytes(Xla(bucket_bytes=1024))
    (None, 1024)
    """
    if algorithm.bucket_bytes == "auto":
        return None if isinstance(algorithm, Xla) and not sends_apart() else BUCKET_BYTES
    return algorithm.bucket_bytes


def sends_apart() -> bool:
    """Return whether XLA sends each array in a separate message, with the latency of a message.

    The result is true between processes on CPUs, where XLA uses gloo. A message of a few bytes then
    takes the same time as a message of a megabyte.
    """
    return here_kind() == "cpu" and jax.process_count() > 1


def plan_buckets(
    leaves: Sequence[Leaf], bucket_bytes: int | None, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Assign leaves to buckets, and return the indices of the leaves of each bucket.

    The buckets are returned in the order in which the last of their leaves is computed. A bucket
    has leaves of one dtype, in order, with at most `bucket_bytes` in total. A larger leaf has a
    bucket for itself.

    Args:
      leaves: the leaves, or their shapes.
      bucket_bytes: the maximum number of bytes of a bucket, or None for a bucket for each leaf.
      order: the indices of the leaves in the order in which they are computed, or None for the
        order from the last leaf to the first.

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
        # The bucket becomes the last entry of `filling`, because the bucket that grew last is
        # complete last.
        if bucket:
            filling[dtype] = bucket, used_bytes + size_bytes
    return full + [bucket for bucket, _ in filling.values()]


def in_buckets(
    function: Callable[[list[int]], Iterable[jax.Array]], buckets: Sequence[list[int]]
) -> list[jax.Array]:
    """Call a function for each bucket, and return the results for all leaves, in their order."""
    found: dict[int, jax.Array] = {}
    for bucket in buckets:
        found |= zip(bucket, function(bucket), strict=True)
    return [found[index] for index in range(len(found))]


def pack(leaves: Sequence[jax.Array]) -> jax.Array:
    """Concatenate leaves of one dtype to a flat array."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    # A concatenation of a single array may remain a copy in the compiled program.
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def unpack(flat: jax.Array, like: Sequence[Leaf]) -> list[jax.Array]:
    """Divide a flat array that `pack` returned into arrays with the shapes of `like`."""
    ends = np.cumsum([leaf.size for leaf in like])
    return [
        flat[end - leaf.size : end].reshape(leaf.shape)
        for leaf, end in zip(like, ends, strict=True)
    ]


def fuses(algorithm: Algorithm, kind: Operation, axis: Axis, payload_bytes: int) -> bool:
    """Return whether the leaves of a bucket are packed into one array.

    The answer is false only if `Auto` with `bucket_bytes: auto` chooses `Xla`, since XLA merges
    collectives itself.

    Args:
      algorithm: the algorithm of the collective.
      kind: the name of the operation, such as "all_reduce".
      axis: the axis of the collective.
      payload_bytes: the bytes of the bucket.
    """
    if isinstance(algorithm, Auto) and algorithm.bucket_bytes == "auto" and not sends_apart():
        return not isinstance(algorithm.choose_here(kind, payload_bytes, axis), Xla)
    return True


def _positions(count: int, order: Sequence[int] | None) -> Sequence[int]:
    if order is None:
        return range(count - 1, -1, -1)
    if sorted(order) != list(range(count)):
        raise CollectiveError(
            f"order {list(order)} of reduce_tree is not a permutation of the tree's {count} "
            f"leaves: name each index from 0 to {count - 1} once"
        )
    return order
