"""The rules of jax's collectives, and of jaxdist's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.collectives.marks import BEGINS, ENDS
from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.elementwise import LINEAR, MOVING, Context, merged

Each = Callable[[Context, Any, Sequence[k.Value]], list[k.Value]]
"""A rule that gives each result by itself."""


def _over(eqn: Any) -> tuple[str, ...]:
    """Return the mesh axes that a collective spans."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def collective(rule: Each) -> Each:
    """Return a collective's rule for all mesh axes, given the rule for axes that it spans.

    Along any other axis, a result has the kind of its operand.
    """

    def chosen(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        if at.axis not in _over(eqn):
            exchanged = {eqn.params.get("split_axis"), eqn.params.get("concat_axis")}
            if isinstance(values[0].kind, k.Shard) and values[0].kind.dims & exchanged:
                kind = at.undecided(eqn, "an all-to-all over another axis along a sharded dim")
                return [k.Value(kind)]
            return [_resized(eqn, value) for value in values[: len(eqn.outvars)]]
        if eqn.params.get("axis_index_groups") is not None:
            kind = at.undecided(eqn, f"{eqn.primitive.name} within groups of devices")
            return [k.Value(kind)] * len(eqn.outvars)
        return rule(at, eqn, values)

    return chosen


def _resized(eqn: Any, value: k.Value) -> k.Value:
    """Return an operand's kind after a collective over another axis has added or removed a dim."""
    by = eqn.outvars[0].aval.ndim - eqn.invars[0].aval.ndim
    if not by:
        return value
    at = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension", 0))
    dims = range(eqn.invars[0].aval.ndim)
    gone = at if by < 0 else -1
    to = {dim: dim + by if dim >= at else dim for dim in dims if dim != gone}
    if isinstance(value.kind, k.Joined | k.Terms) and value.kind.dim == gone:
        return k.Value(k.OWED if isinstance(value.kind, k.Terms) else value.kind)
    return k.Value(k.moved(value.kind, to))


def all_sum(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kinds of the results of `psum`."""
    return [k.Value(summed(at, eqn, value.kind), value.constant) for value in values]


def summed(at: Context, eqn: Any, kind: k.Kind) -> k.Kind:
    """Return the kind of the sum over all devices of a value of some kind."""
    if isinstance(kind, k.Joined):
        return merged(kind.dim, [(size, summed(at, eqn, part)) for size, part in kind.parts])
    if k.spoiled([kind]) or isinstance(kind, k.Zero):
        return kind
    if isinstance(kind, k.Owed | k.Own | k.Count) or kind == k.TALLY:
        return k.WHOLE
    if isinstance(kind, k.Part):
        return _sent(at, eqn, kind)
    if isinstance(kind, k.Whole):
        return k.Multiple(at.place(eqn))
    if isinstance(kind, k.Shard):
        return at.wrong(
            eqn, f"sums over {at.axis!r} rows that belong to different examples ({kind})"
        )
    return at.undecided(eqn, f"a sum over {at.axis!r} of {kind}")


def extreme(name: str) -> Each:
    """Return the rule of `pmax` ("max") or `pmin` ("min")."""

    def rule(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        found = []
        for value in values:
            kind = value.kind
            if isinstance(kind, k.Owed):
                kind = at.wrong(eqn, f"takes p{name} of a partial sum over {at.axis!r}")
            elif isinstance(kind, k.Extreme) and kind.name != name:
                kind = at.wrong(eqn, f"takes p{name} of {kind} over {at.axis!r}")
            elif isinstance(kind, k.Shard):
                kind = at.wrong(eqn, f"takes p{name} over {at.axis!r} of rows of other examples")
            elif isinstance(kind, k.Part):
                kind = _sent(at, eqn, kind)
            elif not k.spoiled([kind]):
                kind = k.WHOLE
            found.append(k.Value(kind, value.constant))
        return found

    return rule


def all_gather(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of the result of `all_gather`: whole for shards along the gathered dim."""
    value, dim = values[0], eqn.params["all_gather_dimension"]
    kind = value.kind
    if k.spoiled([kind]) or kind == k.MESSAGE:
        return [k.Value(kind)]
    if isinstance(kind, k.Part):
        return [k.Value(k.WHOLE)]
    if not eqn.params.get("tiled", False):
        if isinstance(kind, k.Own | k.Shard | k.Whole | k.Zero | k.Count):
            return [k.Value(k.WHOLE)]
        # The result has the partial sums of all devices along a new dim, over which the program may
        # sum later.
        return [k.Value(at.undecided(eqn, f"{kind} is gathered"))]
    if isinstance(kind, k.Shard) and dim in kind.dims:
        return [k.Value(k.WHOLE)]
    if isinstance(kind, k.Owed):
        return [
            k.Value(at.wrong(eqn, f"gathers partial sums over {at.axis!r} as if they were shards"))
        ]
    return [k.Value(at.undecided(eqn, f"an all-gather along dim {dim} of a value that is {kind}"))]


def reduce_scatter(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of the result of `reduce_scatter`: a shard of the sum."""
    dim = eqn.params["scatter_dimension"]
    kind = summed(at, eqn, values[0].kind)
    if isinstance(kind, k.Whole):
        tiled = eqn.params.get("tiled", False)
        kind = k.shard(dim) if tiled else k.OWN
    return [k.Value(kind)]


def all_to_all(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of the result of `all_to_all`: shards along another dim."""
    kind = values[0].kind
    split, joined = eqn.params["split_axis"], eqn.params["concat_axis"]
    if k.spoiled([kind]):
        return [k.Value(kind)]
    if isinstance(kind, k.Part):
        return [k.Value(_sent(at, eqn, kind))]
    if kind == k.shard(joined) and split != joined and eqn.params.get("tiled", False):
        return [k.Value(k.shard(split))]
    return [k.Value(at.undecided(eqn, f"an all-to-all of a value that is {kind}"))]


def permuted(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of the result of `ppermute`.

    A whole value remains whole only if every device receives a message: others get zeros.
    """
    kind = values[0].kind
    complete = len(eqn.params["perm"]) == at.size
    if isinstance(kind, k.Part):
        scheduled = at.axis in at.scheduled
        return [k.Value(k.PART if scheduled else _sent(at, eqn, kind), values[0].constant)]
    if k.spoiled([kind]) or isinstance(kind, k.Zero):
        return [values[0]]
    if isinstance(kind, k.Whole | k.Owed | k.Count) and complete:
        return [values[0]]
    if isinstance(kind, k.Own):
        return [k.Value(k.OWN)]
    return [k.Value(at.undecided(eqn, f"a value that is {kind} goes to another device"))]


def _sent(at: Context, eqn: Any, kind: k.Part) -> k.Kind:
    """Return the kind of what devices receive that send each other values of their own."""
    if kind == k.MESSAGE:
        return kind
    return at.undecided(eqn, "devices send each other their own entries of a stack")


def parted(at: Context, eqn: Any, values: Sequence[k.Value]) -> k.Kind:
    """Return the kind of the results of an operation that has a `Part` among its operands.

    From a device's entry of a stack and whole values, the operation computes the device's entry of
    a stack of results.
    """
    kinds, name = [value.kind for value in values], eqn.primitive.name
    spoilt = k.spoiled(kinds)
    if spoilt is not None:
        return spoilt
    if k.MESSAGE in kinds:
        return k.MESSAGE
    indexed = name == "dynamic_slice" and isinstance(kinds[0], k.Shard) and kinds[0].dims <= {
        dim for dim, start in enumerate(kinds[1:]) if isinstance(start, k.Part)
    }  # fmt: skip
    if not indexed and any(isinstance(kind, UNLIKE) for kind in kinds):
        return at.undecided(eqn, f"{name} of a stack's entries together with other shards")
    if k.TALLY not in kinds:
        return k.PART
    # A term that is whole would be added once by each device, unless the device alone has chosen
    # the branch that adds it.
    others = [kind for kind in kinds if kind != k.TALLY]
    chosen = k.Part | k.Zero | (k.Whole | k.Count if at.chosen else k.Zero)
    adds = name in ("add", "add_any") and all(isinstance(kind, chosen) for kind in others)
    scales = name in ("mul", "div") and kinds[0] == k.TALLY and isinstance(kinds[1], k.Whole)
    moves = name in LINEAR | MOVING and len(kinds) == 1
    return k.TALLY if adds or scales or moves else k.PART


UNLIKE = (k.Shard, k.Owed, k.Extreme, k.Terms, k.Joined, k.Multiple)
"""The kinds that do not combine with a device's own entry of a stack."""


def axis_index(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of the result of `axis_index`: the device's index along the axis."""
    return [k.Value(k.Rank() if at.axis in _over(eqn) else k.WHOLE)]


def marked(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    """Return the kind of a named value, which changes at the marks of `jaxdist.collectives.marks`.

    The value between the marks is a message, and at the end it is the sum of what began.
    """
    mark, _, rest = str(eqn.params["name"]).partition(":")
    if mark not in (BEGINS, ENDS):
        return list(values)
    axes, number, dim = rest.split(":")
    over, kind = at.axis in axes.split(","), values[0].kind
    if mark == BEGINS:
        kind = k.OWED if isinstance(kind, k.Terms) else kind
        at.begun[number] = summed(at, eqn, kind) if over else kind, eqn.outvars[0].aval.ndim
        return [k.Value(kind if k.spoiled([kind]) else k.MESSAGE)]
    total, ndim = at.begun[number]
    gone = ndim - eqn.outvars[0].aval.ndim
    total = k.moved(total, {dim: dim - gone for dim in range(gone, ndim)})
    if isinstance(kind, k.Wrong) or k.spoiled([total]):
        return [k.Value(k.spoiled([kind, total]) or total)]
    if over and dim and isinstance(total, k.Whole):
        return [k.Value(k.shard(int(dim)))]
    return [k.Value(total)]


COLLECTIVES: dict[str, Each] = {
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
    "name": marked,
}
"""The rules of jax's collectives by the name of the primitive."""


def named(name: str) -> Each | None:
    """Return the rule of one of jaxdist's collectives by its function's name, or None for others.

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


def _blocks_summed(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    kind = summed(at, eqn, values[0].kind)
    if isinstance(kind, k.Joined):
        return [k.Value(_without_blocks(at, eqn, kind))]
    return [k.Value(k.shard(0) if isinstance(kind, k.Whole) else kind)]


def _without_blocks(at: Context, eqn: Any, kind: k.Joined) -> k.Kind:
    """Return the kind of this device's block [c] of summed joined arrays in blocks [N, c]."""
    if kind.dim == 0:
        return at.undecided(eqn, f"a reduce-scatter of {kind}")
    parts = [(size, k.shard(0) if isinstance(part, k.Whole) else part) for size, part in kind.parts]
    return merged(kind.dim - 1, parts)


def _blocks_gathered(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    kind = values[0].kind
    if isinstance(kind, k.Owed):
        kind = at.wrong(eqn, f"gathers partial sums over {at.axis!r} as if they were shards")
    elif isinstance(kind, k.Joined):
        parts = [_blocks_gathered(at, eqn, [k.Value(part)])[0].kind for _, part in kind.parts]
        sizes = [size for size, _ in kind.parts]
        kind = merged(kind.dim + 1, list(zip(sizes, parts, strict=True)))
    elif not k.spoiled([kind]):
        kind = k.WHOLE
    return [k.Value(kind)]


def on_other_axes(name: str, at: Context, eqn: Any, value: k.Value) -> k.Value | None:
    """Return an operand's kind along this axis after jaxdist's collective over other axes.

    The result is None where no rule is known.
    """
    kind = value.kind
    if name in ("jaxdist_all_reduce", "jaxdist_broadcast", "jaxdist_all_to_all"):
        return value
    before, after = eqn.invars[-1].aval.ndim, eqn.outvars[0].aval.ndim
    if k.spoiled([kind]) or isinstance(kind, k.Whole | k.Zero | k.Owed | k.Count | k.Own):
        return k.Value(kind)
    if isinstance(kind, k.Joined) and name in ("jaxdist_reduce_scatter", "jaxdist_all_gather"):
        dim = kind.dim + after - before
        return k.Value(
            k.Joined(dim, tuple((s, _shifted(p, after - before)) for s, p in kind.parts))
        )
    if isinstance(kind, k.Shard) and name in ("jaxdist_reduce_scatter", "jaxdist_all_gather"):
        return k.Value(_shifted(kind, after - before))
    return None


def _shifted(kind: k.Kind, by: int) -> k.Kind:
    if not isinstance(kind, k.Shard):
        return kind
    return k.Shard(frozenset(dim + by for dim in kind.dims if dim + by >= 0), kind.inner)


def _spread(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    kind = values[0].kind
    return [k.Value(kind if k.spoiled([kind]) else k.WHOLE)]


def _blocks_exchanged(at: Context, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
    return [k.Value(at.undecided(eqn, "an all-to-all of blocks"))]
