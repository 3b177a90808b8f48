"""The rules of operations that move, join, cut or reduce dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import Context, Found, Rule, merged


def broadcast_in_dim(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a broadcast array, which is constant along its new dims."""
    to = eqn.params["broadcast_dimensions"]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    places = dict(enumerate(to))
    grown = {new for old, new in places.items() if before[old] != after[new]}
    constant = {new for new in range(len(after)) if new not in to} | grown
    value = values[0].moved(places)
    return k.Value(value.kind, value.constant | constant)


def transpose(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a transposed array."""
    return values[0].moved({old: new for new, old in enumerate(eqn.params["permutation"])})


def reshape(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a reshaped array: a sharded dim may be merged with others, or split."""
    value = values[0]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    groups = list(_groups(before, after))
    constant = {new for olds, news in groups for new in news if set(olds) <= value.constant} | {
        dim for dim, size in enumerate(after) if size == 1
    }
    if len(value.constant) == len(before):
        constant = set(range(len(after)))
    kind = value.kind
    if isinstance(kind, k.Terms):
        rest = [size for dim, size in enumerate(before) if dim != kind.dim]
        kind = k.OWED if list(after) == rest else at.undecided(eqn, f"reshape of {kind}")
    if isinstance(kind, k.Joined):
        kind = _reshaped_parts(at, eqn, kind, before, after)
    if isinstance(kind, k.Shard):
        kind = _reshaped(at, eqn, kind, before, after, groups)
    return k.Value(kind, frozenset(constant))


def _reshaped_parts(
    at: Context, eqn: Any, kind: k.Joined, before: Sequence[int], after: Sequence[int]
) -> k.Kind:
    """Return the kind of joined arrays in a shape that differs only by dims of size 1."""
    wide = [dim for dim, size in enumerate(before) if size != 1]
    new = [dim for dim, size in enumerate(after) if size != 1]
    if [before[dim] for dim in wide] != [after[dim] for dim in new] or kind.dim not in wide:
        return at.undecided(eqn, f"reshape of {kind}")
    return k.moved(kind, dict(zip(wide, new, strict=True)))


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return pairs of successive dims before and after a reshape with equal numbers of elements."""
    found, old, new = [], 0, 0
    while old < len(before) or new < len(after):
        olds, news = [], []
        sizes = [1, 1]
        # A dim of size 1 is grouped with the dims that follow: a sharded dim may have one row.
        while sizes[0] != sizes[1] or sizes[0] == 1:
            if old < len(before) and (sizes[0] <= sizes[1] or new >= len(after)):
                olds.append(old)
                sizes[0] *= before[old]
                old += 1
            elif new < len(after):
                news.append(new)
                sizes[1] *= after[new]
                new += 1
            else:
                break
        while old < len(before) and before[old] == 1:
            olds.append(old)
            old += 1
        while new < len(after) and after[new] == 1:
            news.append(new)
            new += 1
        found.append((olds, news))
    return found


def _reshaped(
    at: Context,
    eqn: Any,
    kind: k.Shard,
    before: Sequence[int],
    after: Sequence[int],
    groups: Sequence[tuple[list[int], list[int]]],
) -> k.Kind:
    dims: set[int] = set()
    inner = 1
    for olds, news in groups:
        held = [dim for dim in olds if dim in kind.dims]
        if not held:
            continue
        wide = [dim for dim in olds if before[dim] != 1]
        kept = len([dim for dim in news if after[dim] != 1]) <= 1 and wide in ([], held[-1:])
        if kept and kind.inner == 1:
            # A new dim of size 1 may be the sharded dim too, as when a device's two rows are split
            # into two microbatches.
            dims.update(news)
            continue
        # The number of elements from one row of the sharded part to the next.
        within = kind.inner * math.prod(before[dim] for dim in olds if dim > held[-1])
        if within == 1:
            dims.update(news)
            continue
        tail = 1
        for dim in reversed(news):
            if tail == within:
                dims.add(dim)
                break
            if tail * after[dim] > within or dim == news[0]:
                # The new dim merges the sharded part with some of the elements of each row.
                dims.add(dim)
                inner = max(within // tail, 1)
                break
            tail *= after[dim]
    if not dims:
        return at.undecided(eqn, f"reshape of {kind}")
    return k.Shard(frozenset(dims), inner)


def dropped(dims: Sequence[int], ndim: int) -> dict[int, int]:
    """Return the new number of each dim that remains when some dims are removed."""
    kept = [dim for dim in range(ndim) if dim not in dims]
    return {old: new for new, old in enumerate(kept)}


def reduction(name: str) -> Rule:
    """Return the rule of a reduction over some dims, such as "sum" or "max"."""

    def rule(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
        value, ndim = values[0], eqn.invars[0].aval.ndim
        axes = tuple(eqn.params["axes"])
        to = dropped(axes, ndim)
        constant = frozenset(to[dim] for dim in value.constant if dim in to)
        kind = value.kind
        if isinstance(kind, k.Shard):
            left, shape = kind.dims - set(axes), eqn.invars[0].aval.shape
            held = any(shape[dim] != 1 for dim in kind.dims)
            doubtful = bool(held and left) and all(shape[dim] == 1 for dim in left)
            left = frozenset() if doubtful else left
            if left:
                kind = k.moved(k.Shard(left, kind.inner), to)
            elif name == "sum":
                # jax writes the removal of dims of size 1 as a sum too.
                removal = all(shape[dim] == 1 for dim in axes)
                kind = k.DOUBTFUL if doubtful or removal else k.OWED
            elif name in ("max", "min"):
                kind = k.Extreme(name)
            elif name in ("and", "or"):
                kind = k.OWN
            else:
                kind = at.undecided(eqn, f"{eqn.primitive.name} over a sharded dim")
        elif isinstance(kind, k.Whole | k.Count) and name == "sum":
            shape = eqn.invars[0].aval.shape
            if any(dim in value.constant and shape[dim] != 1 for dim in axes):
                kind = k.COUNT
        elif isinstance(kind, k.Terms | k.Joined):
            kind = at.undecided(eqn, f"{eqn.primitive.name} of {kind}")
        elif isinstance(kind, k.Owed) and name != "sum":
            kind = at.wrong(eqn, f"takes {name} of a partial sum over {at.axis!r}")
        elif isinstance(kind, k.Zero) and name not in ("sum", "max", "min", "or", "and"):
            kind = k.WHOLE
        return k.Value(kind, constant)

    return rule


def squeeze(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of an array without dims of size 1.

    If a removed dim was the sharded dim, the result is the device's own entry of a stack.
    """
    value = values[0]
    to = dropped(eqn.params["dimensions"], eqn.invars[0].aval.ndim)
    kind = value.kind
    if isinstance(kind, k.Terms):
        kind = k.Terms(to[kind.dim]) if kind.dim in to else k.OWED
    if isinstance(kind, k.Shard):
        kind = k.moved(kind, to) if kind.dims & to.keys() else k.PART
    return k.Value(kind, frozenset(to[dim] for dim in value.constant if dim in to))


def expand_dims(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of an array with new dims of size 1."""
    new = set(eqn.params["dimensions"])
    kept = [dim for dim in range(eqn.outvars[0].aval.ndim) if dim not in new]
    to = dict(enumerate(kept))
    value = values[0].moved(to)
    return k.Value(value.kind, value.constant | new)


def concatenate(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of concatenated arrays: their common kind, or `Joined` with every part."""
    dim = eqn.params["dimension"]
    return _in_a_row(dim, [var.aval.shape[dim] for var in eqn.invars], values)


def stack(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of arrays that are stacked along a new dim."""
    new = eqn.params["axis"]
    to = {dim: dim + (dim >= new) for dim in range(eqn.invars[0].aval.ndim)}
    return _in_a_row(new, [1] * len(values), [value.moved(to) for value in values])


def unstack(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kinds of the entries of an array along a dim, which the entries do not have."""
    value, gone = values[0], eqn.params["axis"]
    to = dropped([gone], eqn.invars[0].aval.ndim)
    kind = value.kind
    if isinstance(kind, k.Joined) and kind.dim == gone:
        kinds = [part for size, part in kind.parts for _ in range(size)]
    elif isinstance(kind, k.Shard) and not kind.dims & to.keys():
        kinds = [at.undecided(eqn, "a sharded dim is taken apart")] * len(eqn.outvars)
    else:
        kinds = [kind] * len(eqn.outvars)
    return [value.of_kind(one).moved(to) for one in kinds]


def _in_a_row(dim: int, sizes: Sequence[int], values: Sequence[k.Value]) -> k.Value:
    """Return the kind of arrays that are joined along a dim."""
    kinds = {value.kind for value in values}
    constant = frozenset.intersection(*(value.constant for value in values))
    dims = [kind.dims for kind in kinds if isinstance(kind, k.Shard)]
    if len(kinds - {k.ZERO}) <= 1:
        kind = next(iter(kinds - {k.ZERO}), k.ZERO)
    elif all(isinstance(kind, k.Shard | k.Zero) for kind in kinds) and frozenset.intersection(
        *dims
    ):
        kind = k.Shard(frozenset.intersection(*dims))
    else:
        kind = merged(dim, list(zip(sizes, (value.kind for value in values), strict=True)))
    if isinstance(kind, k.Shard) and dim in kind.dims:
        kind = k.Shard(kind.dims)  # `inner` is dropped, since the order of merged rows has changed
    return k.Value(kind, constant - ({dim} if kind != k.ZERO else set()))


def same_dims(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kinds of the results of padding, slicing, splitting or reversing an array."""
    kinds = [value.kind for value in values]
    if isinstance(kinds[0], k.Joined):
        pads = eqn.primitive.name == "pad"
        return _padded(at, eqn, kinds[0], kinds[1]) if pads else _cut(at, eqn, kinds[0])
    kind, *rest = kinds
    if (
        eqn.primitive.name == "pad"
        and not isinstance(rest[0], k.Zero)
        and not isinstance(kind, k.Zero)
    ):
        if isinstance(kind, k.Owed):
            kind = at.wrong(eqn, f"pads a partial sum over {at.axis!r} with what is not zero")
        return kind
    if eqn.primitive.name == "pad" and isinstance(kind, k.Zero):
        kind = rest[0]
    keeps = eqn.primitive.name != "pad" or isinstance(kind, k.Zero)
    constant = values[0].constant if keeps else frozenset()
    return k.Value(kind, constant)


def _padded(at: Context, eqn: Any, joined: k.Joined, filler: k.Kind) -> k.Kind:
    """Return the kind of joined arrays that are padded with zeros at both ends."""
    low, high, inner = eqn.params["padding_config"][joined.dim]
    if inner or min(low, high) < 0 or not isinstance(filler, k.Zero):
        return at.undecided(eqn, f"pad of {joined}")
    ends = [[(size, k.ZERO)] if size else [] for size in (low, high)]
    return merged(joined.dim, [*ends[0], *joined.parts, *ends[1]])


def _cut(at: Context, eqn: Any, joined: k.Joined) -> Found:
    """Return the kinds of a slice, or of the pieces of a split, of joined arrays."""
    dim, name = joined.dim, eqn.primitive.name
    if name == "slice" and eqn.params["strides"] is None:
        pieces = [(eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim])]
    elif name == "split" and eqn.params["axis"] == dim:
        ends = [sum(eqn.params["sizes"][: i + 1]) for i in range(len(eqn.outvars))]
        pieces = list(zip([0, *ends], ends, strict=False))
    else:
        return at.undecided(eqn, f"{name} of {joined}")
    found = []
    for start, stop in pieces:
        begin, held = 0, []
        for size, kind in joined.parts:
            overlap = min(begin + size, stop) - max(begin, start)
            if overlap > 0:
                held.append((overlap, kind))
            begin += size
        found.append(k.Value(merged(dim, held) if held else k.ZERO))
    return found


def dynamic_slice(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of a slice at a variable index.

    The slice of a whole array that begins at the device's index times its size is a shard.
    """
    value, starts = values[0], values[1:]
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    for dim, start in enumerate(starts):
        if isinstance(start.kind, k.Rank):
            if isinstance(value.kind, k.Whole) and start.kind.factor == sizes[dim]:
                whole = sizes[dim] * at.size == shape[dim]
                return k.Value(k.shard(dim) if whole else k.OWN, value.constant)
            if isinstance(value.kind, k.Owed | k.Whole):
                return at.undecided(eqn, "a slice that each device takes elsewhere")
        if isinstance(start.kind, k.Own | k.Shard):
            return at.undecided(eqn, "a slice that each device takes elsewhere")
    return k.Value(value.kind, value.constant)


def dynamic_update_slice(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of an array in which a slice at a variable index is replaced."""
    target, update, starts = values[0], values[1], values[2:]
    if any(isinstance(start.kind, k.Rank | k.Own | k.Shard) for start in starts):
        return at.undecided(eqn, "each device writes to a place of its own")
    return written(at, eqn, target, update)


def written(at: Context, eqn: Any, target: k.Value, update: k.Value) -> k.Kind:
    """Return the kind of an array in which `update` replaces a part of `target`."""
    kinds = {target.kind, update.kind}
    if len(kinds - {k.ZERO}) <= 1:
        return next(iter(kinds - {k.ZERO}), k.ZERO)
    if kinds <= {k.WHOLE, k.COUNT, k.ZERO}:
        return k.WHOLE
    for one, other in ((target, update), (update, target)):
        if isinstance(one.kind, k.Shard):
            dims = other.kind.dims if isinstance(other.kind, k.Shard) else other.constant
            shards = isinstance(other.kind, k.Shard | k.Whole) and one.kind.dims & dims
            if shards:
                return k.Shard(shards)
    return at.undecided(eqn, f"{update.kind} is written into {target.kind}")
