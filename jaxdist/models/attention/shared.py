"""Attention over a sequence that several devices share, inside `jax.shard_map`.

Two methods are combined. Within a group, devices exchange the split of the sequence for a split of
the heads (Ulysses). Between groups, keys and values are gathered, or rotate around a ring (ring
attention). The running softmax is in float32. Blocks in which causality or the window hides every
key are skipped.

Dims: B batch, L sequence, l a device's piece of the sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.cost.context import SequenceSplit
from jaxdist.hlo.source.marks import enters, gives, leaves, takes
from jaxdist.models.attention.blockwise import MOST, Residuals
from jaxdist.models.attention.contract import KEPT, Qkv
from jaxdist.models.attention.softmax import Grads, Queries, RunningSoftmax
from jaxdist.models.attention.visits import BlockPairs, Pieces

Keys = tuple[jax.Array, jax.Array, jax.Array | None]
"""The keys, values and document numbers of one piece of the sequence, cut into blocks."""
Whole = Callable[..., jax.Array]
"""A function from (q, k, v, segments) of whole sequences to the attended values."""
DOCUMENTS = 5
"""The number by which `enters` marks the document numbers. The numbers 0 to 4 mark the other
operands of the backward pass."""


@dataclass(frozen=True)
class Groups:
    """The devices that share a sequence, in groups of U: device n is number n % U of group n // U.

    Attributes:
      split: the method by which the devices share the sequence; `split.swapped` is U.
    """

    split: SequenceSplit

    def own(self) -> jax.Array:
        """Return the number of this device's group."""
        return lax.axis_index(self.split.axes) // self.split.swapped

    def moved(self, tree: Any, by: int) -> Any:
        """Send arrays `by` groups onward in the ring, and return the arrays that arrive."""
        C, step = self.split.size, by * self.split.swapped
        pairs = [(n, (n + step) % C) for n in range(C)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.split.axes, pairs), tree)

    def exchanged(self, x: jax.Array, split: int, joined: int) -> jax.Array:
        """Exchange parts of an array within each group, by an all-to-all.

        Args:
          x: the array of this device.
          split: the dim of x that is split over the devices of the group.
          joined: the dim along which the parts that arrive are joined.
        """
        if self.split.swapped == 1:
            return x
        members = self._members()
        given = {"split_axis": split, "concat_axis": joined, "tiled": True}
        return lax.all_to_all(x, self.split.axes, axis_index_groups=members, **given)

    def whole(self, segments_Bl: jax.Array | None) -> jax.Array | None:
        """Gather the document numbers of all devices of the group along the sequence.

        If `segments_Bl` is None, the result is None.
        """
        if segments_Bl is None or self.split.swapped == 1:
            return segments_Bl
        given: dict[str, Any] = {"axis": 1, "tiled": True, "axis_index_groups": self._members()}
        return lax.all_gather(segments_Bl, self.split.axes, **given)

    def gathered(self, x: jax.Array, *, axis: int = 0, tiled: bool = False) -> jax.Array:
        """Gather an array from all groups.

        If `tiled` is true, the arrays are concatenated along dim `axis`. If `tiled` is false, the
        arrays are stacked along a new dim `axis`.
        """
        peers = self._peers()
        return lax.all_gather(x, self.split.axes, axis_index_groups=peers, axis=axis, tiled=tiled)

    def scattered(self, x: jax.Array, *, axis: int = 0, tiled: bool = False) -> jax.Array:
        """Sum an array over all groups, and return this group's part of the sum along dim `axis`.

        If `tiled` is true, the part keeps this dim. If `tiled` is false, the dim must have one
        entry for each group, and the part lacks the dim.
        """
        given: dict[str, Any] = {"scatter_dimension": axis, "tiled": tiled}
        return lax.psum_scatter(x, self.split.axes, axis_index_groups=self._peers(), **given)

    def _peers(self) -> list[list[int]] | None:
        """Return the lists of devices that have equal numbers in their groups.

        The result is None if there is a single list, which has all devices.
        """
        U = self.split.swapped
        return None if U == 1 else [[*range(n, self.split.size, U)] for n in range(U)]

    def _members(self) -> list[list[int]] | None:
        U = self.split.swapped
        if self.split.size == U:
            return None
        return [[*range(first, first + U)] for first in range(0, self.split.size, U)]


def attend_shared(
    split: SequenceSplit,
    kernel: Whole,
    *arrays: jax.Array,
    window: int | None,
    causal: bool,
    most: int = MOST,
    pieces: Whole | None = None,
) -> jax.Array:
    """Compute attention, as `Kernel` specifies, from this device's pieces of all arrays.

    Args:
      split: the method by which devices share the sequence.
      kernel: the kernel for whole sequences. This kernel is used only if there is a single group,
        whose devices then have whole sequences of some heads.
      arrays: this device's pieces of the arrays of a `Qkv`.
      most: the largest number of positions in a block.
      pieces: a function with the arguments of `Splash.pieces`, which computes the attention of a
        part of the queries to the gathered keys. With None, no kernel is used. If `pieces` is None,
        or if keys rotate, attention is computed block by block.
    """
    groups = Groups(split)
    given = Qkv(*arrays)
    local: Any = partial(_attended, groups, kernel, pieces, most, window=window, causal=causal)
    if split.swapped == 1 and (pieces is None or split.rotates):
        return local(given)
    # The types of `jaxdist.proofs` cannot follow an exchange within groups, so `takes` and `gives`
    # declare to the proofs how the arguments are split.
    shared = dict.fromkeys(split.axes, 1)
    return gives(local(jax.tree.map(lambda x: takes(x, shared), given)), shared)


def _attended(
    groups: Groups,
    kernel: Whole,
    pieces: Whole | None,
    most: int,
    given: Qkv,
    *,
    window: int | None,
    causal: bool,
) -> jax.Array:
    split = groups.split
    *qkv, segments_Bl = given
    q, k, v = (groups.exchanged(x, 2, 1) for x in qkv)
    given = Qkv(q, k, v, groups.whole(segments_Bl))
    if split.groups == 1:
        out: Any = kernel(given)
    elif pieces is not None and not split.rotates:
        local = partial(_to_gathered, groups, partial(pieces, window=window, causal=causal))
        # Keys are gathered again for the backward pass, so that no device keeps the keys of other
        # devices.
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        out = jax.checkpoint(local, policy=policy)(given)
    else:
        length = given.q.shape[1]
        cut = Pieces.of(split.order, split.groups, length, most, window, causal=causal)
        out = _among_groups(cut, groups, given)
    return groups.exchanged(out, 1, 2)


def _to_gathered(groups: Groups, pieces: Whole, given: Qkv) -> jax.Array:
    split, (q_BlHd, k_BlKd, v_BlKd, segments_Bl) = groups.split, given
    k_BLKd, v_BLKd = (_in_order(split, _whole_keys(groups, x)) for x in (k_BlKd, v_BlKd))
    segments = None
    if segments_Bl is not None:
        whole_BL = groups.gathered(segments_Bl, axis=1, tiled=True)
        segments = segments_Bl, _in_order(split, whole_BL)
    return pieces(split, groups.own(), q_BlHd, k_BLKd, v_BLKd, segments)


def _in_order(split: SequenceSplit, x: jax.Array) -> jax.Array:
    """Return an array `[B, L, ...]` in the order of the sequence, from the order of a split.

    Reshapes reorder the positions, since libtpu needs minutes to compile a gather of positions.
    """
    R, (B, L, *rest) = split.groups, x.shape
    if split.order == "striped":
        return x.reshape(B, R, L // R, *rest).swapaxes(1, 2).reshape(x.shape)
    if split.order == "zigzag":
        pairs = x.reshape(B, R, 2, L // (2 * R), *rest)
        # Group g has the chunks g and 2R - 1 - g, so the second chunks are in reverse order.
        early, late = pairs[:, :, 0], pairs[:, ::-1, 1]
        return jnp.concatenate([early, late], axis=1).reshape(x.shape)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_keys(groups: Groups, x_BlKd: jax.Array) -> jax.Array:
    """Gather keys along the sequence.

    The backward pass sums the gradients of the keys in float32.
    """
    return groups.gathered(x_BlKd, axis=1, tiled=True)


def _scattered_grads(groups: Groups, _: None, grads_BLKd: jax.Array) -> tuple[jax.Array]:
    sums = groups.scattered(grads_BLKd.astype(jnp.float32), axis=1, tiled=True)
    return (sums.astype(grads_BLKd.dtype),)


_whole_keys.defvjp(lambda groups, x: (_whole_keys(groups, x), None), _scattered_grads)


@dataclass(frozen=True)
class _Rotating:
    """Keys that rotate around the ring: a hop replaces a group's keys by the previous group's keys.

    Attributes:
      keys: the keys that this group has after `passed` hops.
    """

    groups: Groups
    keys: Keys
    passed: int = 0

    def after(self, t: int) -> tuple[_Rotating, Keys]:
        """Return the state after t hops in all, and the keys that this group then has."""
        keys = self.groups.moved(self.keys, t - self.passed) if t > self.passed else self.keys
        return _Rotating(self.groups, keys, t), keys


@dataclass(frozen=True)
class _Gathered:
    """The keys of all R groups, `[R, N, ...]`, which are gathered at the start."""

    groups: Groups
    keys: Keys

    def after(self, t: int) -> tuple[_Gathered, Keys]:
        source = (self.groups.own() - t) % self.groups.split.groups
        return self, jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, source, 0, False), self.keys
        )


def _source(groups: Groups, keys: Keys) -> _Rotating | _Gathered:
    if groups.split.rotates:
        return _Rotating(groups, keys)
    return _Gathered(groups, jax.tree.map(groups.gathered, keys))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _among_groups(pieces: Pieces, groups: Groups, given: Qkv) -> jax.Array:
    return _forward(pieces, groups, given)[0]


def _forward(pieces: Pieces, groups: Groups, given: Qkv) -> tuple[jax.Array, Residuals]:
    *qkv, segments_Bl = given
    entered = (enters(x, groups.split.axes, number) for number, x in enumerate(qkv))
    q, k, v = (pieces.cut(x, given.k.shape[2]) for x in entered)
    own = _own_documents(pieces, groups, segments_Bl)
    source, rows = _source(groups, (k, v, own)), RunningSoftmax.start(q)
    # At hop 0 a group sees its own keys. Each query sees at least the key at its own position, so
    # the sums of every query are valid after hop 0.
    for t in pieces.hops():
        source, (k, v, theirs) = source.after(t)

        def see(
            rows: RunningSoftmax, visit: BlockPairs, k: Any = k, v: Any = v, theirs: Any = theirs
        ) -> RunningSoftmax:
            scores = _scores(pieces, visit, q, k, own, theirs)
            return rows.seeing(visit.i, scores, v[visit.j])

        rows = _visited(pieces, groups, t, rows, see)
    found = (rows.out / rows.total[..., None]).astype(q.dtype)
    out_BlHd = leaves(pieces.joined(found, given.q.shape), groups.split.axes, 0)
    out_BlHd = checkpoint_name(out_BlHd, KEPT)
    log_total = checkpoint_name(rows.top + jnp.log(rows.total), KEPT)
    return out_BlHd, (given, out_BlHd, log_total)


def _own_documents(pieces: Pieces, groups: Groups, segments_Bl: jax.Array | None) -> Any:
    """Cut this group's document numbers into blocks, or return None for None.

    The numbers first pass through `enters`, as every array that enters the function does.
    """
    if segments_Bl is None:
        return None
    return pieces.cut_segments(enters(segments_Bl, groups.split.axes, DOCUMENTS))


def _scores(
    pieces: Pieces, visit: BlockPairs, q: jax.Array, k: jax.Array, own: Any, theirs: Any
) -> jax.Array:
    documents = None if own is None else (own[visit.i], theirs[visit.j])
    return pieces.scores(q[visit.i], k[visit.j], visit, documents)


def _visited(
    pieces: Pieces, groups: Groups, t: int, carry: Any, see: Callable[[Any, BlockPairs], Any]
) -> Any:
    """Fold `see` over the pairs of blocks that this group visits after t hops.

    `see` maps (carry, pair) to the next carry. The result is the last carry.
    """
    for visit in pieces.visits(t, groups.own()):

        def all_pairs(carry: Any, visit: BlockPairs = visit) -> Any:
            pairs = visit._replace(live=None)
            return lax.scan(lambda rows, pair: (see(rows, pair), None), carry, pairs)[0]

        if visit.live is None:
            carry = all_pairs(carry)
        else:
            carry = lax.cond(visit.live, all_pairs, lambda rows: rows, carry)
    return carry


def _backward(
    pieces: Pieces, groups: Groups, kept: Residuals, cotangent_BlHd: jax.Array
) -> tuple[Any]:
    given, out_BlHd, log_total = kept
    *qkv, segments_Bl = given
    arrays = (*qkv, out_BlHd, cotangent_BlHd)
    entered = (enters(x, groups.split.axes, number) for number, x in enumerate(arrays))
    q, k, v, out, dout = (pieces.cut(x, given.k.shape[2]) for x in entered)
    own = _own_documents(pieces, groups, segments_Bl)
    queries = Queries.of_result(q, out, dout, log_total)
    # Without the barrier, XLA would keep the keys of a whole sequence, which the forward pass
    # received.
    k, v = lax.optimization_barrier((k, v))
    source, home = _source(groups, (k, v, own)), _Home(groups, (k, v))
    dq = jnp.zeros(q.shape, jnp.float32)
    for t in pieces.hops():
        source, (k, v, theirs) = source.after(t)

        def see(
            grads: Grads, visit: BlockPairs, k: Any = k, v: Any = v, theirs: Any = theirs
        ) -> Grads:
            scores = _scores(pieces, visit, q, k, own, theirs)
            found = queries.grads(visit.i, scores, k[visit.j], v[visit.j])
            dq, dk, dv = grads
            i, j = visit.i, visit.j
            return dq.at[i].add(found[0]), dk.at[j].add(found[1]), dv.at[j].add(found[2])

        dq, *more = _visited(pieces, groups, t, (dq, *home.before(t)), see)
        home.add(t, more)
    grads = (dq, *home.found())
    found = (pieces.joined(g.astype(x.dtype), x.shape) for g, x in zip(grads, qkv, strict=True))
    return (Qkv(*(leaves(g, groups.split.axes, number) for number, g in enumerate(found))),)


class _Home:
    """The gradients of keys and values, in float32, which are summed and sent to the keys' group.

    If keys rotate, the sums of other groups' queries rotate together with the keys. Otherwise a
    reduce-scatter at the end sends each sum to the group of its keys.
    """

    def __init__(self, groups: Groups, keys: tuple[jax.Array, jax.Array]) -> None:
        self.groups = groups
        self.zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys)
        self.own: Any = None
        self.travelling: Any = None
        self.by_hop: dict[int, Any] = {}
        self.last = 0

    def before(self, t: int) -> tuple[jax.Array, ...]:
        """Return the sums so far for the keys that this group has after t hops."""
        if self.travelling is None or not self.groups.split.rotates:
            return self.zeros
        return self.groups.moved(self.travelling, t - self.last)

    def add(self, t: int, sums: Any) -> None:
        """Store the new sums for the keys that this group has after t hops."""
        if t == 0:
            self.own = sums
        elif self.groups.split.rotates:
            self.travelling, self.last = sums, t
        else:
            self.by_hop[t] = sums

    def found(self) -> list[jax.Array]:
        """Return the gradients of the keys and values that this group had at first.

        The gradients are summed over the queries of all groups.
        """
        if self.groups.split.rotates:
            home = (
                [] if self.travelling is None else [self.groups.moved(self.travelling, -self.last)]
            )
        else:
            home = [self._scattered()]
        return [jnp.asarray(sum(each)) for each in zip(self.own, *home, strict=True)]

    def _scattered(self) -> list[jax.Array]:
        """Return the sums from other groups' queries, by a reduce-scatter over the groups."""
        R, own = self.groups.split.groups, self.groups.own()
        found = []
        for n, zeros in enumerate(self.zeros):
            sums = jnp.zeros((R, *zeros.shape), jnp.float32)
            for t, each in self.by_hop.items():
                sums = lax.dynamic_update_index_in_dim(sums, each[n], (own - t) % R, 0)
            found.append(self.groups.scattered(sums))
        return found


_among_groups.defvjp(_forward, _backward)
