"""The compressed all-reduce, which sends messages instead of gradients, with error feedback.

With N devices and a bucket of n elements on each, a shard has c = ceil(n / N) elements. The codec's
`exchange` is the method by which the messages are combined:

    scatter   encode N shards, all-to-all, decode, sum in float32 [c], encode again, all-gather
    gather    encode, all-gather, decode all N messages and add them up in order
    sum       one or more all-reduces of the messages of a linear codec

Every device decodes the same words in the same order, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis, axis_size, checked, rank
from jaxdist.collectives.bucket import BUCKET_BYTES, pack, unpack
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import XLA
from jaxdist.compression.choice import Choice, CodecGroup, plan_groups
from jaxdist.compression.contract import CodecState, first_round
from jaxdist.compression.exchange import (
    BucketState,
    ExchangeContext,
    gather_decoded,
    scatter_decoded,
    sum_up,
)
from jaxdist.compression.feedback.classic import CLASSIC
from jaxdist.compression.feedback.contract import Feedback
from jaxdist.compression.sender import array_is_finite, select_tree
from jaxdist.errors import CompressionError
from jaxdist.hlo.source.marks import begins, ends
from jaxdist.trees import flatten_with_names
from jaxdist.types import Grads, Leaf, PyTree

EXCHANGES = {"scatter": scatter_decoded, "gather": gather_decoded}


class GroupState(NamedTuple):
    """The state of the codecs and of error feedback for a group of leaves.

    Attributes:
      codecs: for each stage of the codecs, the state that the stage's codec has for each bucket.
      buckets: the state of each bucket.
    """

    codecs: tuple[tuple[CodecState, ...], ...]
    buckets: tuple[BucketState, ...]


class CompressionState(NamedTuple):
    """The state of all devices between reductions.

    Every leaf has a first dim that counts devices. Inside `jax.shard_map`, with `P(axis)` as
    in_specs and out_specs, a device sees [1, ...].

    Attributes:
      step: the number of earlier reductions, int32.
      skipped: the number of earlier reductions that had a NaN or an infinity, int32.
      groups: the state of each group of leaves that have the same choice of codec.
    """

    step: jax.Array
    skipped: jax.Array
    groups: tuple[GroupState, ...]


class Reduced(NamedTuple):
    """The result of a compressed reduction.

    Attributes:
      grads: the sum or mean, a tree like the gradients. All elements are NaN if `finite` is false.
      state: the next state. If `finite` is false, this is the old state, with `step` and `skipped`
        larger by 1.
      finite: whether the result and the gradients of all devices are finite, a bool scalar that is
        the same on all devices.
    """

    grads: Grads
    state: CompressionState
    finite: jax.Array


def init_state(
    grads: Grads,
    devices: int,
    *,
    codec: Choice,
    feedback: Feedback = CLASSIC,
    bucket_bytes: int = BUCKET_BYTES,
) -> CompressionState:
    """Return the state before the first reduction, for all devices.

    Args:
      grads: the gradients of one device, or their shapes.
      devices: the number N of devices on the axis of the reduction.
      codec: a codec, stages of codecs, or a choice for each parameter.
      feedback: the error feedback.
      bucket_bytes: the maximum number of bytes of a bucket.

    Returns:
      The state as arrays [N, ...]. Under `jax.jit` with `out_shardings`, each device creates only
      its part.

    Raises:
      CompressionError: a codec cannot encode a leaf, the stages of a choice do not fit together,
        the feedback does not fit a codec, or a rule matches no parameter.
    """
    named = flatten_with_names(grads)
    leaves = [leaf for _, leaf in named]
    groups = plan_groups(named, codec, feedback, bucket_bytes)
    zero = jnp.int32(0)
    own = CompressionState(
        zero, zero, tuple(_group_state(group, leaves, devices, feedback) for group in groups)
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (devices, *x.shape)), own)


def _group_state(
    group: CodecGroup, leaves: Sequence[Leaf], devices: int, feedback: Feedback
) -> GroupState:
    likes = group.likes(leaves)
    codecs = tuple(tuple(codec.init(like) for like in likes) for codec in group.codecs)
    buckets = [
        BucketState.init(like, devices, group.codecs, feedback, in_shards=group.in_shards)
        for like in likes
    ]
    return GroupState(codecs, tuple([BucketState()] * len(likes) if group.lossless else buckets))


def compressed_all_reduce(
    grads: Grads,
    state: CompressionState,
    axis: Axis,
    *,
    codec: Choice,
    feedback: Feedback = CLASSIC,
    op: Literal["sum", "mean"] = "sum",
    algorithm: Algorithm = XLA,
    bucket_bytes: int = BUCKET_BYTES,
    seed: int = 0,
) -> Reduced:
    """All-reduce gradients as messages of a codec, inside `jax.shard_map`.

    The result has the same bits on all devices. The `shard_map` needs `check_vma=False`, because
    JAX cannot prove this.

    Args:
      grads: this device's gradients, a tree of floating-point arrays.
      state: the state from `init_state` or from the previous reduction, [1, ...] on each device.
        `init_state` must have been called with the same codec, feedback and bucket_bytes.
      axis: the name of a mesh axis, or a tuple of names. The axis across the slowest network comes
        first.
      codec: a codec, stages of codecs, or a choice for each parameter.
      feedback: the error feedback of every sender.
      op: "sum" or "mean". With "mean" the gradients are divided before they are encoded, so
        residuals are errors of the mean, and limits of norms are limits of the mean's norm.
      algorithm: the algorithm of the collectives that send the messages.
      bucket_bytes: the maximum number of bytes of a flat bucket, into which leaves with the same
        choice are packed.
      seed: the seed of all random choices, the same on all devices.

    Raises:
      CompressionError: a codec cannot encode a leaf, the stages of a choice do not fit together,
        the feedback does not fit a codec, a rule matches no parameter, or the state was created
        with other arguments.
      CollectiveError: the call is not inside a `jax.shard_map`, or the axis is unknown.
    """
    axis = checked(axis, "compressed_all_reduce")
    named, structure = flatten_with_names(grads), jax.tree.structure(grads)
    groups = plan_groups(named, codec, feedback, bucket_bytes)
    own = jax.tree.map(lambda x: x[0], state)
    size = axis_size(axis)
    leaves = [jnp.asarray(leaf) for _, leaf in named]
    _check_state(own, groups, leaves, size, feedback)
    party = ExchangeContext(axis, algorithm, feedback, first_round(seed, own.step, rank(axis)))
    # Skipped rounds do not count, so the stages of a codec follow the steps of the optimizer.
    taken = own.step - own.skipped
    terms = [begins(x, axis, number) for number, x in enumerate(leaves)]
    sent = [x / size for x in terms] if op == "mean" else terms
    ready = feedback.prepare(sent, size)
    results, after = list(leaves), []
    for index, (group, held) in enumerate(zip(groups, own.groups, strict=True)):
        found, next_held = _reduce_group(group, ready, held, party.part(index), taken)
        after.append(next_held)
        for position, result in found.items():
            results[position] = ends(result.astype(leaves[position].dtype), axis, position)
    # Only the encoded gradients are checked on every device. A NaN or an infinity in any other
    # gradient is found in the result.
    encoded = [leaves[i] for group in groups if not group.lossless for i in group.positions]
    finite = _all_finite(encoded, results, axis)
    moved = own._replace(groups=select_tree(finite, tuple(after), own.groups))
    counted = moved._replace(step=own.step + 1, skipped=own.skipped + jnp.int32(~finite))
    marked = [jnp.where(finite, x, jnp.nan) for x in results]
    whole: PyTree = jax.tree.map(lambda x: x[None], counted)
    return Reduced(structure.unflatten(marked), whole, finite)


def _all_finite(leaves: Sequence[jax.Array], results: Sequence[jax.Array], axis: Axis) -> jax.Array:
    """Return whether all leaves and results are finite on all devices.

    Args:
      leaves: the arrays that differ between devices; their check all-reduces one number.
      results: the arrays that are the same on all devices.
      axis: the axis of the devices.
    """
    fine = jnp.bool_(True)
    if leaves:
        bad = sum((jnp.int32(~array_is_finite(x)) for x in leaves), start=jnp.int32(0))
        fine = jax.lax.psum(bad, axis) == 0
    for x in results:
        fine = fine & array_is_finite(x)
    return fine


def _reduce_group(
    group: CodecGroup,
    leaves: Sequence[jax.Array],
    state: GroupState,
    party: ExchangeContext,
    taken: jax.Array,
) -> tuple[dict[int, jax.Array], GroupState]:
    """Return the sums of a group's leaves, by the indices of the leaves, and the next state.

    Args:
      group: the group of leaves that have the same choice of codec.
      leaves: the gradients of this device for all leaves.
      state: the group's state.
      party: the settings of the exchange.
      taken: the number of earlier rounds that were not skipped, which determines the stage.
    """
    members = [[leaves[i].astype(jnp.float32) for i in bucket] for bucket in group.buckets]
    xs = [pack(member) if group.flat else member[0] for member in members]
    branches = [partial(_run, group, stage, party) for stage in range(len(group.codecs))]
    if len(branches) == 1:
        totals, after = branches[0](xs, state)
    else:
        starts = jnp.asarray(group.starts[1:], jnp.int32)
        stage = jnp.sum(taken >= starts)
        totals, after = jax.lax.switch(stage, branches, xs, state)
    found: dict[int, jax.Array] = {}
    for bucket, total, member in zip(group.buckets, totals, members, strict=True):
        found |= zip(bucket, unpack(total.reshape(-1), member), strict=True)
    return found, after


def _run(
    group: CodecGroup, stage: int, party: ExchangeContext, xs: list[jax.Array], state: GroupState
) -> tuple[list[jax.Array], GroupState]:
    """Exchange all buckets of a group by the codec of a stage.

    Args:
      group: the group of leaves that have the same choice of codec.
      stage: the index of the stage in `group.codecs`.
      party: the settings of the exchange.
      xs: this device's buckets.
      state: the group's state.

    Returns:
      The sum of each bucket, and the group's next state.
    """
    codec, states = group.codecs[stage], state.codecs[stage]
    if group.lossless:
        party = party.without_feedback()
    if group.in_shards or codec.exchange == "gather":
        send = EXCHANGES["scatter" if group.in_shards else "gather"]
        found = [
            send(codec, x, held, kept, party.part(i))
            for i, (x, held, kept) in enumerate(zip(xs, states, state.buckets, strict=True))
        ]
    else:
        found = sum_up(codec, xs, states, state.buckets, party)
    totals, after, kept = zip(*found, strict=True)
    codecs = (*state.codecs[:stage], tuple(after), *state.codecs[stage + 1 :])
    return list(totals), GroupState(codecs, tuple(kept))


def _check_state(
    state: CompressionState,
    groups: Sequence[CodecGroup],
    leaves: Sequence[Leaf],
    devices: int,
    feedback: Feedback,
) -> None:
    shapes = jax.eval_shape(
        lambda: tuple(_group_state(group, leaves, devices, feedback) for group in groups)
    )

    def forms(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)

    if forms(shapes) != forms(state.groups):
        raise CompressionError(
            "the state does not fit the other arguments of compressed_all_reduce. Create the "
            "state by init_state with the same gradients, codec, feedback and bucket_bytes, for "
            f"{devices} devices. Shard the state over the axis, so that each device receives [1, "
            "...]"
        )
