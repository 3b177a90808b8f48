"""The rules of jax's collectives, and of jaxdist's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxdist.proofs.types.elementwise import Context, Rule, merged
from jaxdist.proofs.types.kinds import (
    OWED,
    OWN,
    PART,
    WHOLE,
    Count,
    Extreme,
    Joined,
    Kind,
    Multiple,
    Owed,
    Own,
    Part,
    Rank,
    Shard,
    Terms,
    Value,
    Whole,
    Zero,
    shard,
    spoiled,
)
from jaxdist.proofs.types.shapes import moved


def _over(eqn: Any) -> tuple[str, ...]:
    """Return the mesh axes that a collective spans."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def collective(rule: Rule) -> Rule:
    """Return a collective's rule for all mesh axes, given the rule for axes that it spans.

    Along any other axis, a result has the kind of its operand.
    """

    def chosen(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
        if at.axis not in _over(eqn):
            exchanged = {eqn.params.get("split_axis"), eqn.params.get("concat_axis")}
            if isinstance(values[0].kind, Shard) and values[0].kind.dims & exchanged:
                kind = at.undecided(eqn, "an all-to-all over another axis along a sharded dim")
                return [Value(kind)]
            return [_resized(eqn, value) for value in values[: len(eqn.outvars)]]
        if eqn.params.get("axis_index_groups") is not None:
            kind = at.undecided(eqn, f"{eqn.primitive.name} within groups of devices")
            return [Value(kind)] * len(eqn.outvars)
        return rule(at, eqn, values)

    return chosen


def _resized(eqn: Any, value: Value) -> Value:
    """Return an operand's kind after a collective over another axis has added or removed a dim."""
    by = eqn.outvars[0].aval.ndim - eqn.invars[0].aval.ndim
    if not by:
        return value
    at = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension", 0))
    dims = range(eqn.invars[0].aval.ndim)
    gone = at if by < 0 else -1
    to = {dim: dim + by if dim >= at else dim for dim in dims if dim != gone}
    if isinstance(value.kind, Joined | Terms) and value.kind.dim == gone:
        return Value(OWED if isinstance(value.kind, Terms) else value.kind)
    return Value(moved(value.kind, to))


def all_sum(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kinds of the results of `psum`."""
    return [Value(summed(at, eqn, value.kind), value.constant) for value in values]


def summed(at: Context, eqn: Any, kind: Kind) -> Kind:
    """Return the kind of the sum over all devices of a value of some kind."""
    if isinstance(kind, Joined):
        return merged(kind.dim, [(size, summed(at, eqn, part)) for size, part in kind.parts])
    if spoiled([kind]) or isinstance(kind, Zero):
        return kind
    if isinstance(kind, Owed | Own | Count):
        return WHOLE
    if isinstance(kind, Whole):
        return Multiple(at.place(eqn))
    if isinstance(kind, Shard):
        return at.wrong(
            eqn, f"sums over {at.axis!r} rows that belong to different examples ({kind})"
        )
    return at.undecided(eqn, f"a sum over {at.axis!r} of {kind}")


def extreme(name: str) -> Rule:
    """Return the rule of `pmax` ("max") or `pmin` ("min")."""

    def rule(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
        found = []
        for value in values:
            kind = value.kind
            if isinstance(kind, Owed):
                kind = at.wrong(eqn, f"takes p{name} of a partial sum over {at.axis!r}")
            elif isinstance(kind, Extreme) and kind.name != name:
                kind = at.wrong(eqn, f"takes p{name} of {kind} over {at.axis!r}")
            elif isinstance(kind, Shard):
                kind = at.wrong(eqn, f"takes p{name} over {at.axis!r} of rows of other examples")
            elif not spoiled([kind]):
                kind = WHOLE
            found.append(Value(kind, value.constant))
        return found

    return rule


def all_gather(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of the result of `all_gather`: whole for shards along the gathered dim."""
    value, dim = values[0], eqn.params["all_gather_dimension"]
    kind = value.kind
    if spoiled([kind]):
        return [Value(kind)]
    if not eqn.params.get("tiled", False):
        if isinstance(kind, Own | Shard | Whole | Zero | Count):
            return [Value(WHOLE)]
        # The result has the partial sums of all devices along a new dim, over which the program may
        # sum later.
        return [Value(at.undecided(eqn, f"{kind} is gathered"))]
    if isinstance(kind, Shard) and dim in kind.dims:
        return [Value(WHOLE)]
    if isinstance(kind, Owed):
        return [
            Value(at.wrong(eqn, f"gathers partial sums over {at.axis!r} as if they were shards"))
        ]
    return [Value(at.undecided(eqn, f"an all-gather along dim {dim} of a value that is {kind}"))]


def reduce_scatter(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of the result of `reduce_scatter`: a shard of the sum."""
    dim = eqn.params["scatter_dimension"]
    kind = summed(at, eqn, values[0].kind)
    if isinstance(kind, Whole):
        tiled = eqn.params.get("tiled", False)
        kind = shard(dim) if tiled else OWN
    return [Value(kind)]


def all_to_all(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of the result of `all_to_all`: shards along another dim."""
    kind = values[0].kind
    split, joined = eqn.params["split_axis"], eqn.params["concat_axis"]
    if spoiled([kind]):
        return [Value(kind)]
    if kind == shard(joined) and split != joined and eqn.params.get("tiled", False):
        return [Value(shard(split))]
    return [Value(at.undecided(eqn, f"an all-to-all of a value that is {kind}"))]


def permuted(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of the result of `ppermute`.

    A whole value remains whole only if every device receives a message: others get zeros.
    """
    kind = values[0].kind
    complete = len(eqn.params["perm"]) == at.size
    if spoiled([kind]) or (isinstance(kind, Whole | Zero | Owed | Count) and complete):
        return [values[0]]
    if isinstance(kind, Own):
        return [Value(OWN)]
    return [Value(at.undecided(eqn, f"a value that is {kind} goes to another device"))]


def parted(at: Context, eqn: Any, values: Sequence[Value]) -> Kind:
    """Return the kind of the results of an operation that has a `Part` among its operands.

    From a device's entry of a stack and whole values, the operation computes the device's entry of
    a stack of results.
    """
    kinds = [value.kind for value in values]
    spoilt = spoiled(kinds)
    if spoilt is not None:
        return spoilt
    over = at.axis in _over(eqn) if eqn.primitive.name in COLLECTIVES else named(_called(eqn))
    if over:
        gathers = eqn.primitive.name.startswith("all_gather")
        return WHOLE if gathers else at.undecided(
            eqn, "devices send each other their own entries of a stack (the stages of a pipeline)"
        )  # fmt: skip
    if all(isinstance(kind, Part | Whole | Zero | Count | Own | Rank) for kind in kinds):
        return PART
    return at.undecided(eqn, f"{eqn.primitive.name} of entries of a stack and other shards")


def _called(eqn: Any) -> str:
    return str(eqn.params.get("name") or "")


def axis_index(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Return the kind of the result of `axis_index`: the device's index along the axis."""
    return [Value(Rank() if at.axis in _over(eqn) else WHOLE)]


COLLECTIVES: dict[str, Rule] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), collective(all_sum)),
    "pmax": collective(extreme("max")),
    "pmin": collective(extreme("min")),
    **dict.fromkeys(
        ("all_gather", "all_gather_invariant", "all_gather_reduced"), collective(all_gather)
    ),
    "reduce_scatter": collective(reduce_scatter),
    "all_to_all": collective(all_to_all),
    "ppermute": collective(permuted),
    "axis_index": axis_index,
}
"""The rules of jax's collectives by the name of the primitive."""


def named(name: str) -> Rule | None:
    """Return the rule of one of jaxdist's own collectives by its function's name; None for others.

    The algorithms of jaxdist send blocks that depend on the device's index, which no rule can
    follow. `tests/collectives` tests that the algorithms sum and gather. The operands of the
    collectives are flat arrays, or blocks [N, c].
    """
    return {
        "jaxdist_all_reduce": all_sum,
        "jaxdist_reduce_scatter": _blocks_summed,
        "jaxdist_all_gather": _blocks_gathered,
        "jaxdist_broadcast": _spread,
        "jaxdist_all_to_all": _blocks_exchanged,
    }.get(name)


def _blocks_summed(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    kind = summed(at, eqn, values[0].kind)
    if isinstance(kind, Joined):
        return [Value(_without_blocks(at, eqn, kind))]
    return [Value(shard(0) if isinstance(kind, Whole) else kind)]


def _without_blocks(at: Context, eqn: Any, kind: Joined) -> Kind:
    """Return the kind of this device's block [c] of summed joined arrays in blocks [N, c]."""
    if kind.dim == 0:
        return at.undecided(eqn, f"a reduce-scatter of {kind}")
    parts = [(size, shard(0) if isinstance(part, Whole) else part) for size, part in kind.parts]
    return merged(kind.dim - 1, parts)


def _blocks_gathered(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    kind = values[0].kind
    if isinstance(kind, Owed):
        kind = at.wrong(eqn, f"gathers partial sums over {at.axis!r} as if they were shards")
    elif isinstance(kind, Joined):
        parts = [_blocks_gathered(at, eqn, [Value(part)])[0].kind for _, part in kind.parts]
        sizes = [size for size, _ in kind.parts]
        kind = merged(kind.dim + 1, list(zip(sizes, parts, strict=True)))
    elif not spoiled([kind]):
        kind = WHOLE
    return [Value(kind)]


def on_other_axes(name: str, at: Context, eqn: Any, value: Value) -> Value | None:
    """Return an operand's kind along this axis after jaxdist's collective over other axes.

    The result is None where no rule is known.
    """
    kind = value.kind
    if name in ("jaxdist_all_reduce", "jaxdist_broadcast", "jaxdist_all_to_all"):
        return value
    before, after = eqn.invars[-1].aval.ndim, eqn.outvars[0].aval.ndim
    if spoiled([kind]) or isinstance(kind, Whole | Zero | Owed | Count | Own):
        return Value(kind)
    if isinstance(kind, Joined) and name in ("jaxdist_reduce_scatter", "jaxdist_all_gather"):
        dim = kind.dim + after - before
        return Value(Joined(dim, tuple((s, _shifted(p, after - before)) for s, p in kind.parts)))
    if isinstance(kind, Shard) and name in ("jaxdist_reduce_scatter", "jaxdist_all_gather"):
        return Value(_shifted(kind, after - before))
    return None


def _shifted(kind: Kind, by: int) -> Kind:
    if not isinstance(kind, Shard):
        return kind
    return Shard(frozenset(dim + by for dim in kind.dims if dim + by >= 0), kind.inner)


def _spread(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    kind = values[0].kind
    return [Value(kind if spoiled([kind]) else WHOLE)]


def _blocks_exchanged(at: Context, eqn: Any, values: Sequence[Value]) -> list[Value]:
    return [Value(at.undecided(eqn, "an all-to-all of blocks"))]
