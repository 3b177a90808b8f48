"""The rules of operations that move, join, slice or reduce dims."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Sequence

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import common
from jaxdist.proofs.types.op import Found, Op


def renumbered(op: Op) -> Found:
    """Return the kind of an array whose dims are moved, added or removed.

    The array is constant along new dims.
    """
    p, before = op.params, op.ins[0].shape
    to = {
        "broadcast_in_dim": lambda: dict(enumerate(p["broadcast_dimensions"])),
        "transpose": lambda: {old: new for new, old in enumerate(p["permutation"])},
        "squeeze": lambda: dropped(p["dimensions"], len(before)),
    }[op.name]()
    kept = {new for old, new in to.items() if before[old] == op.out.shape[new]}
    value = op.values[0].moved(to)
    return k.Value(value.kind, value.constant | (op.every - kept))


def reshape(op: Op) -> Found:
    """Return the kind of a reshaped array.

    A reshape may split a sharded dim, or merge it with other dims.
    """
    before, after = op.ins[0].shape, op.out.shape
    groups, (value,), kind = list(_groups(before, after)), op.values, op.kinds[0]
    constant = {dim for dim, size in enumerate(after) if size == 1}
    constant |= {new for olds, news in groups for new in news if {*olds} <= value.constant}
    if len(value.constant) == len(before):
        constant = op.every
    if isinstance(kind, k.Joined):
        # The shapes may differ only by dims of size 1.
        wide, new = ([dim for dim, n in enumerate(shape) if n != 1] for shape in (before, after))
        same = [before[dim] for dim in wide] == [after[dim] for dim in new] and kind.dim in wide
        to = dict(zip(wide, new, strict=False))
        kind = k.moved(kind, to) if same else op.undecided(f"reshape of {kind}")
    elif isinstance(kind, k.Shard):
        kind = _reshaped(op, kind, groups) or op.undecided(f"reshape of {kind}")
    return k.Value(kind, frozenset(constant))


Groups = list[tuple[list[int], list[int]]]


def _groups(before: Sequence[int], after: Sequence[int]) -> Groups:
    """Return the groups of dims that a reshape keeps apart, in order.

    Each group is a pair of a list of successive dims before the reshape and a list of successive
    dims after the reshape. The product of the dims' sizes is the same for both lists.
    """
    ends = [[*itertools.accumulate(shape, operator.mul)] for shape in (before, after)]
    # A dim of size 1 ends where the dim before it ends, and is grouped with that dim. The first
    # dims of size 1 are grouped with the dims that follow.
    borders = sorted({*ends[0]} & {*ends[1]} - {1})
    found: Groups = [([], []) for _ in range(max(len(borders), 1))]
    for side in (0, 1):
        for dim, end in enumerate(ends[side]):
            found[bisect_left(borders, end)][side].append(dim)
    return found


def _reshaped(op: Op, kind: k.Shard, groups: Groups) -> k.Kind | None:
    before, after = op.ins[0].shape, op.out.shape
    dims, inner = _at_borders(op, kind, groups), 1
    for olds, news in groups:
        held = [dim for dim in olds if dim in kind.dims]
        if not held:
            continue
        if [before[dim] for dim in olds] == [after[dim] for dim in news]:
            dims.update(news[olds.index(dim)] for dim in held)
            inner = kind.inner
            continue
        wide = [dim for dim in olds if before[dim] != 1]
        kept = len([dim for dim in news if after[dim] != 1]) <= 1 and wide in ([], held[-1:])
        # `within` is the number of elements from a row of the sharded part to the next row.
        within = kind.inner * math.prod(before[dim] for dim in olds if dim > held[-1])
        if (kept and kind.inner == 1) or within == 1 or not news:
            # A new dim of size 1 may be the sharded dim too, as when a device's two rows are split
            # into two microbatches.
            dims.update(news)
            continue
        tails = {dim: math.prod(after[dim + 1 : news[-1] + 1]) for dim in news[::-1]}
        fits = (d for d, tail in tails.items() if tail == within or tail * after[d] > within)
        dim = next(fits, news[0])
        dims.add(dim)
        # An index of the new dim may cover several consecutive elements of each device's shard.
        inner = inner if tails[dim] == within else max(within // tails[dim], 1)
    return k.Shard(frozenset(dims), inner) if dims else None


def _last_ones(dims: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the dims of size 1 at the end of some successive dims of a shape."""
    ones = itertools.takewhile(lambda dim: shape[dim] == 1, dims[::-1])
    return [*ones][::-1]


def _at_borders(op: Op, kind: k.Shard, groups: Groups) -> set[int]:
    """Return new dims outside of the group of the sharded dim that may be sharded too.

    A dim of size 1 between two groups may belong to either group. If the reshape adds such a dim,
    it may be the outer part of the dim after it, such as the dim of kv_heads on a device that has a
    single one of these heads. If the reshape removes such a dim, it may have been merged with the
    dim after it.
    """
    before, after = op.ins[0].shape, op.out.shape
    dims = set[int]()
    for (olds, news), (olds_after, news_after) in itertools.pairwise(groups):
        gone, added = _last_ones(olds, before), _last_ones(news, after)
        more = len(added) - len(gone)
        if more > 0 and {*olds_after[:1]} & kind.dims:
            dims.update(added[-more:])
        elif more < 0 and {*gone[more:]} & kind.dims:
            dims.update(news_after[:1])
    return dims


def dropped(dims: Sequence[int], ndim: int) -> dict[int, int]:
    """Return the new number of each dim that remains after removal of `dims`.

    Args:
      dims: the removed dims.
      ndim: the number of dims before the removal.
    """
    kept = [dim for dim in range(ndim) if dim not in dims]
    return {old: new for new, old in enumerate(kept)}


def reduction(op: Op) -> Found:
    """Return the kind of a reduction over some dims, such as a sum or a maximum."""
    return _reduction(op, 0, op.name.removeprefix("reduce_"), op.params["axes"])


def additions(op: Op) -> Found:
    """Return the kinds of a `jax.lax.reduce` that adds the elements of each array to zero.

    The kind is undecided if the function of the reduce does anything else.
    """
    body, count = getattr(op.params["jaxpr"], "jaxpr", op.params["jaxpr"]), len(op.values) // 2
    added = {(eqn.primitive.name, *eqn.invars, *eqn.outvars) for eqn in body.eqns}
    pairs = zip(body.invars[:count], body.invars[count:], body.outvars, strict=True)
    zeros = all(isinstance(kind, k.Zero) for kind in op.kinds[count:])
    if added != {("add", *pair) for pair in pairs} or not zeros:
        return op.no_rule("a reduce whose function does not only add to zeros")
    return [_reduction(op, number, "sum", op.params["dimensions"]) for number in range(count)]


def _reduction(op: Op, number: int, name: str, axes: Sequence[int]) -> k.Value:
    """Return the value of a reduction of an operand over the dims `axes`."""
    value, shape = op.values[number], op.ins[number].shape
    kind, to = value.kind, dropped(axes, len(shape))
    if isinstance(kind, k.Shard):
        kind = _reduced(op, name, kind, shape, to)
    elif isinstance(kind, k.Whole | k.Count) and name == "sum":
        equal = any(dim in value.constant and shape[dim] != 1 for dim in axes)
        kind = k.COUNT if equal else kind
    elif isinstance(kind, k.Joined) or (isinstance(kind, k.Extreme) and kind.name != name):
        kind = op.no_rule(f"{op.name} of a value that is {kind}")
    elif isinstance(kind, k.Owed) and name != "sum":
        kind = op.wrong(f"takes {name} of a partial sum over AXIS")
    elif isinstance(kind, k.Zero) and name not in ("sum", "max", "min", "or", "and"):
        kind = k.WHOLE
    return k.Value(kind, frozenset(to[dim] for dim in value.constant if dim in to))


def _reduced(op: Op, name: str, kind: k.Shard, shape: Sequence[int], to: dict[int, int]) -> k.Kind:
    """Return the kind of a reduction of a shard over the dims that are not in `to`."""
    left = kind.dims & to.keys()
    held = any(shape[dim] != 1 for dim in kind.dims)
    doubtful = bool(held and left) and all(shape[dim] == 1 for dim in left)
    if left and not doubtful:
        return k.moved(k.Shard(left, kind.inner), to)
    if name == "sum":
        # jax writes the removal of dims of size 1 as a sum too.
        removal = all(shape[dim] == 1 for dim in range(len(shape)) if dim not in to)
        return k.DOUBTFUL if doubtful or removal else k.OWED
    made = {"max": k.Extreme(name), "min": k.Extreme(name), "and": k.OWN, "or": k.OWN}
    return made.get(name) or op.no_rule(f"{op.name} over a sharded dim")


def concatenate(op: Op) -> Found:
    """Return the kind of concatenated arrays, which is their common kind or `Joined`."""
    dim = op.params["dimension"]
    return _in_a_row(dim, [aval.shape[dim] for aval in op.ins], op.values)


def stack(op: Op) -> Found:
    """Return the kind of arrays that are stacked along a new dim."""
    new, ndim = op.params["axis"], op.ins[0].ndim
    values = [value.resized(ndim, 1, new) for value in op.values]
    return _in_a_row(new, [1] * len(values), values)


def unstack(op: Op) -> Found:
    """Return the kinds of the entries into which an array is split along a dim.

    The entries do not have that dim.
    """
    (value,), gone, kind = op.values, op.params["axis"], op.kinds[0]
    kinds = [kind] * len(op.eqn.outvars)
    if isinstance(kind, k.Joined) and kind.dim == gone:
        kinds = [part for size, part in kind.parts for _ in range(size)]
    elif getattr(kind, "dims", None) == {gone}:
        return op.undecided("a sharded dim is taken apart")
    return [value.of_kind(one).resized(op.ins[0].ndim, -1, gone) for one in kinds]


def _in_a_row(dim: int, sizes: Sequence[int], values: Sequence[k.Value]) -> k.Value:
    """Return the kind of arrays that are concatenated along a dim.

    Args:
      dim: the dim along which the arrays are joined.
      sizes: the size of each array along the dim.
      values: the arrays.
    """
    kinds = [value.kind for value in values]
    others = {*kinds} - {k.ZERO}
    constant = frozenset.intersection(*(value.constant for value in values))
    shards = [kind for kind in others if isinstance(kind, k.Shard)]
    dims = common(shards) if shards and len(shards) == len(others) else None
    if len(others) <= 1:
        kind = next(iter(others), k.ZERO)
    else:
        kind = k.Shard(dims) if dims else k.concatenated(dim, list(zip(sizes, kinds, strict=True)))
    if isinstance(kind, k.Shard) and dim in kind.dims:
        kind = k.Shard(kind.dims)  # `inner` is dropped: the order of merged rows has changed.
    return k.Value(kind, constant - ({dim} if kind != k.ZERO else set()))


def same_dims(op: Op) -> Found:
    """Return the kinds of the results of a slice, split or reversal.

    Every result has the kind of the array. If the array is a concatenation of
    arrays of several kinds, a result has the kinds of the parts that it overlaps.
    """
    kind = op.kinds[0]
    return _cut(op, kind) if isinstance(kind, k.Joined) else op.values[0]


def pad(op: Op) -> Found:
    """Return the kind of a padded array.

    A partial sum must be padded with zeros. Joined arrays become joined arrays with additional
    parts for the zeros at the two ends.
    """
    kind, filler = op.kinds[:2]
    zeros = isinstance(filler, k.Zero)
    if isinstance(kind, k.Joined):
        low, high, inner = op.params["padding_config"][kind.dim]
        if inner or min(low, high) < 0 or not zeros:
            return op.no_rule(f"a pad of a value that is {kind}")
        parts = (low, k.ZERO), *kind.parts, (high, k.ZERO)
        return k.concatenated(kind.dim, [part for part in parts if part[0]])
    if isinstance(kind, k.Zero):
        return k.Value(filler, op.values[0].constant if zeros else frozenset())
    if isinstance(kind, k.Owed) and not zeros:
        return op.wrong("pads a partial sum over AXIS with values that are not zero")
    padded = {dim for dim, widths in enumerate(op.params["padding_config"]) if any(widths)}
    return k.Value(kind, op.values[0].constant - padded)


def _cut(op: Op, joined: k.Joined) -> Found:
    """Return the kinds of the results of a slice or a split of joined arrays."""
    dim, params = joined.dim, op.params
    if op.name == "slice" and params["strides"] is None:
        pieces = [(params["start_indices"][dim], params["limit_indices"][dim])]
    elif op.name == "split" and params["axis"] == dim:
        ends = [sum(params["sizes"][: i + 1]) for i in range(len(op.eqn.outvars))]
        pieces = list(zip([0, *ends], ends, strict=False))
    else:
        return op.no_rule(f"{op.name} of a value that is {joined}")
    found = []
    for start, stop in pieces:
        begin, held = 0, []
        for size, kind in joined.parts:
            overlap = min(begin + size, stop) - max(begin, start)
            held += [(overlap, kind)] if overlap > 0 else []
            begin += size
        found.append(k.Value(k.concatenated(dim, held) if held else k.ZERO))
    return found


def dynamic_slice(op: Op) -> Found:
    """Return the kind of a slice at a variable index.

    A slice of a whole array is a shard if it begins at the device's index times the slice's size.
    """
    value, sizes = op.values[0], op.params["slice_sizes"]
    for dim, start in enumerate(op.kinds[1:]):
        if start == k.Rank(sizes[dim]) and isinstance(value.kind, k.Whole):
            tiles = sizes[dim] * op.at.size == op.ins[0].shape[dim]
            return value.of_kind(k.shard(dim) if tiles else k.OWN)
        ranked = isinstance(start, k.Rank) and isinstance(value.kind, k.Owed | k.Whole)
        if ranked or isinstance(start, k.Own | k.Shard):
            return op.no_rule("a slice that begins at a different index on each device")
    return value


def dynamic_update_slice(op: Op) -> Found:
    """Return the value of an array in which a slice at a variable index is replaced."""
    target, update, *_ = op.values
    into, slice_ = (aval.shape for aval in op.ins[:2])
    # Along a dim that the slice spans, elements are either all replaced or all kept.
    spanned = {dim for dim, size in enumerate(into) if slice_[dim] == size}
    kind = written(op, target, update, op.kinds[2:])
    return k.Value(kind, target.constant & update.constant & spanned)


def written(op: Op, target: k.Value, update: k.Value, places: Sequence[k.Kind]) -> k.Kind:
    """Return the kind of an array in which `update` replaces the part of `target` at `places`.

    The result is undecided if `places` differ between devices.
    """
    if not all(isinstance(place, k.SAME) for place in places):
        return op.no_rule("a write to indices that differ between devices")
    otherwise = op.no_rule(
        f"a write of a value that is {update.kind} into an array that is {target.kind}"
    )
    return k.joined(target, update, otherwise).kind
