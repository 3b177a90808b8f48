"""The kinds of values that enter and leave a `shard_map`."""

from __future__ import annotations

from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import Context


def entering(spec: Any, axis: str) -> k.Value:
    """Return the kind of an operand inside a `shard_map`, by its entry of `in_specs`."""
    for dim, entry in enumerate(spec or ()):
        if axis in (entry if isinstance(entry, tuple) else (entry,)):
            return k.Value(k.shard(dim))
    return k.Value(k.WHOLE)


def check_leaving(at: Context, value: k.Value, spec: Any, where: str) -> k.Kind:
    """Compare a result of `shard_map` with its entry of `out_specs`, and return its kind.

    Args:
      at: the pass.
      value: the result.
      spec: the result's entry of `out_specs`.
      where: the place to report.
    """
    kind, axis = value.kind, at.axis
    dims = [
        dim
        for dim, entry in enumerate(spec or ())
        if axis in (entry if isinstance(entry, tuple) else (entry,))
    ]
    if isinstance(kind, k.Multiple):
        return at.too_large(kind.where)
    if k.spoiled([kind]) or isinstance(kind, k.Zero):
        return kind
    if not dims:
        if isinstance(kind, k.Whole | k.Count):
            return kind
        unsure = isinstance(kind, k.Part) and kind != k.TALLY
        if unsure or isinstance(kind, k.Own) or kind == k.DOUBTFUL:
            return k.Unknown(frozenset([f"{axis}: {where}: {kind} leaves as a whole value"]))
        remedy = {
            k.Owed: f"a psum over {axis!r} is missing",
            k.Shard: f"an all-gather over {axis!r} is missing, or {axis!r} in out_specs",
            k.Extreme: f"a pmax or pmin over {axis!r} is missing",
            k.Rank: "each device keeps another value",
            **dict.fromkeys((k.Terms, k.Part), f"a psum over {axis!r} is missing"),
        }.get(type(kind), "each part of it needs what it is owed")
        return at.wrong_at(where, f"leaves as a whole value, and is {kind} over {axis!r}: {remedy}")
    if isinstance(kind, k.Part) or (isinstance(kind, k.Shard) and dims[0] in kind.dims):
        return kind
    if isinstance(kind, k.Whole) and dims[0] in value.constant:
        return kind
    if isinstance(kind, k.Owed):
        return k.Terms(dims[0])
    if isinstance(kind, k.Whole):
        return at.wrong_at(
            where,
            f"leaves as shards along dim {dims[0]}, and is whole on every device: the result has "
            f"{at.size} copies of it",
        )
    return k.Unknown(frozenset([f"{axis}: {where}: a value that is {kind} leaves as shards"]))
