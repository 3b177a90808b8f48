"""The rules of elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.op import Found, Op

_LINEAR = (
    "add sub add_any neg mul div select_n convert_element_type copy copy_p real imag complex "
    "conj reduce_precision optimization_barrier stop_gradient name pvary pcast reshard "
    "sharding_constraint"
)
LINEAR = frozenset(_LINEAR.split())
"""The elementwise operations whose result is a partial sum if an operand is a partial sum and the
other operands allow it."""
_OTHERS = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz "
    "cos cosh digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mulhi ne nextafter not or polygamma "
    "population_count pow regularized_incomplete_beta rem round rsqrt shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor"
)
ELEMENTWISE = LINEAR | frozenset(_OTHERS.split())
"""All elementwise operations."""
_MOVING = "reshape broadcast_in_dim transpose squeeze expand_dims slice split concatenate"
MOVING = frozenset(_MOVING.split())
KEEPING = ELEMENTWISE | MOVING
"""The operations that a program may apply to a sum before the division that makes it a mean."""


def elementwise(op: Op) -> Found:
    """Return the kinds of the results of an elementwise operation."""
    pairs = zip(op.ins, op.values, strict=True)
    constant = (value.constant | _broadcast(op, aval) for aval, value in pairs)
    kind = kind_of_elementwise(op)
    return k.Value(kind, op.every.intersection(*constant if kind != k.ZERO else ()))


def _broadcast(op: Op, aval: Any) -> frozenset[int]:
    """Return the dims of the result along which an elementwise operation repeats an operand.

    Args:
      op: the operation.
      aval: the shape and dtype of the operand.
    """
    same = aval.shape if aval.ndim == op.out.ndim else ()
    return op.every - {dim for dim, size in enumerate(same) if size == op.out.shape[dim]}


def kind_of_elementwise(op: Op) -> k.Kind:
    """Return the kind of the result of an elementwise operation."""
    if op.has(k.Joined):
        return _of_joined(op)
    if spoilt := k.spoiled(op.kinds):
        return spoilt
    zeros = op.name in ("mul", "and") and op.has(k.Zero)
    if zeros or (op.all(k.Zero) and op.name in LINEAR - {"div"}):
        return k.ZERO
    if op.name == "select_n" and isinstance(op.kinds[0], k.Zero):
        return op.kinds[1]  # A predicate that is False everywhere selects the first case.
    if op.has(k.Rank) and op.out.ndim:
        own = [v.of_kind(k.OWN) if isinstance(v.kind, k.Rank) else v for v in op.values]
        op = op.of(own)
    for kind, rule in RULES_OF.items():
        if op.has(kind):
            return rule(op)
    if op.name in ("div", "mul") and isinstance(op.kinds[0], k.Whole) and _shares(op):
        # Each device has the value divided by the number of devices, so the sum over the devices is
        # the value.
        return k.COUNT
    if op.has(k.Own):
        return k.OWN
    pairs = zip(op.ins, op.values, strict=True)
    fixed = all(isinstance(v.kind, k.Count) or len(v.constant) == aval.ndim for aval, v in pairs)
    return k.COUNT if op.has(k.Count) and fixed else k.WHOLE


def _shares(op: Op) -> int:
    """Return n if an equation divides by the constant `n * devices`, or 0 for any other equation.

    `devices` is the number of devices along the axis of the pass.
    """
    factor = getattr(op.eqn.invars[-1], "val", None)
    if factor is None or op.name not in ("div", "mul") or op.at.size == 1:
        return 0
    copies = float(factor) if op.name == "div" else 1 / (float(factor) or math.inf)
    times = round(copies / op.at.size)
    return times if abs(copies / op.at.size - times) < 1e-6 else 0


def _of_joined(op: Op) -> k.Kind:
    """Return the kind of an elementwise operation that applies to each part of joined arrays.

    The result is undecided if an operand is a shard, or if the operands are joined along different
    dims or with different sizes.
    """
    all_joined = [kind for kind in op.kinds if isinstance(kind, k.Joined)]
    if len({(kind.dim, kind.sizes) for kind in all_joined}) > 1:
        return op.no_rule("arrays that are joined along different dims or with different sizes")
    if op.has(k.Shard):
        return op.no_rule(f"{op.name} of joined arrays and a shard")
    parts = []
    for place, size in enumerate(all_joined[0].sizes):
        kinds = [one.parts[place][1] if isinstance(one, k.Joined) else one for one in op.kinds]
        mine = [value.of_kind(kind) for value, kind in zip(op.values, kinds, strict=True)]
        parts.append((size, kind_of_elementwise(op.of(mine))))
    return k.concatenated(all_joined[0].dim, parts)


def _of_multiple(op: Op) -> k.Kind:
    if op.name in LINEAR and len(op.kinds) == 1:
        return op.kinds[0]
    if _shares(op) == 1 and isinstance(op.kinds[0], k.Multiple):
        return k.WHOLE
    where = next(one.where for one in op.kinds if isinstance(one, k.Multiple))
    return op.at.wrong_at(where, op.at.copies)


def _of_rank(op: Op) -> k.Kind:
    """Return the kind of arithmetic on a device's index.

    The result is a `Rank` for a constant multiple of the index, zero for a test whether the index
    is negative, and otherwise `Own`.
    """
    name, kinds = op.name, op.kinds
    rank = next(one for one in kinds if isinstance(one, k.Rank))
    if name in ("convert_element_type", "copy", "pvary"):
        return rank
    if name == "mul":
        other = op.eqn.invars[1 if isinstance(kinds[0], k.Rank) else 0]
        if getattr(other, "val", None) is not None:
            return k.Rank(rank.factor * int(other.val))
    if name in ("add", "sub") and k.ZERO in kinds and (name == "add" or kinds[0] == rank):
        return rank
    if name == "lt" and kinds == [rank, k.ZERO]:
        # jnp tests whether an index is negative. The index of a device is never negative, so the
        # result of the test is zero.
        return k.ZERO
    return k.OWN


def _of_owed(op: Op) -> k.Kind:
    """Return the kind of the result of an operation on partial sums.

    The result is a partial sum if the operation is linear. Other operations are errors or are
    undecided.
    """
    name, kinds = op.name, op.kinds
    if op.has(k.Own):
        return op.no_rule(f"{name} of a partial sum and a value that differs between devices")
    owed = [isinstance(kind, k.Owed) for kind in kinds]
    adds = name in ("add", "sub", "add_any")
    scales = name == "mul" or (name == "div" and owed[0])
    selects = name == "select_n" and isinstance(kinds[0], k.SAME)
    if (
        (adds and op.all(k.Owed | k.Zero | k.Count))
        or (scales and sum(owed) == 1 and op.all(k.Owed | k.SAME))
        or (selects and all(isinstance(kind, k.Owed | k.Zero) for kind in kinds[1:]))
        or (name in LINEAR and len(kinds) == 1)
    ):
        return k.OWED
    if name == "is_finite":
        return k.OWN
    first = "sum it over the axis first"
    message = f"takes {name} of a partial sum over AXIS, which is not linear: {first}"
    if adds:
        other = next(one for one in kinds if not isinstance(one, k.Owed | k.Zero))
        whole = f"a whole value, which each of the {op.at.size} devices would add"
        said = whole if isinstance(other, k.Whole) else other
        message = f"adds a partial sum over AXIS and {said}"
    elif name == "div" and owed[1]:
        rows = "the count or weight of this device's rows alone"
        message = f"divides by a partial sum over AXIS: {rows}; {first}"
    elif name in ("eq", "ne") and op.has(k.Zero):
        # The usual guard against division by zero lets a device without weight divide by 1, which
        # is right only if the program multiplies by the same number later.
        return op.undecided("the program tests whether the weight of this device's rows is zero")
    # For integers the result is undecided, because the code may intend to compute an index from the
    # number of rows on the device.
    if op.ins[owed.index(True)].dtype.kind in "iu":
        return op.no_rule(f"{name} of a count of this device's own rows")
    return op.wrong(message)


def _of_extreme(op: Op) -> k.Kind:
    found = next(kind for kind in op.kinds if isinstance(kind, k.Extreme))
    keeps = op.name in ("convert_element_type", "stop_gradient", "copy")
    if keeps or (op.name == found.name and {*op.kinds} == {found}):
        return found
    return op.no_rule(f"{op.name} of {found} over {op.at.axis!r}")


def common(shards: Sequence[k.Kind]) -> frozenset[int]:
    """Return the dims along which every given shard may be sharded; other kinds are ignored."""
    return frozenset.intersection(*(one.dims for one in shards if isinstance(one, k.Shard)))


def _of_shards(op: Op) -> k.Kind:
    shards = [kind for kind in op.kinds if isinstance(kind, k.Shard)]
    dims, first = common(shards), shards[0]
    if not dims:
        other = next(one for one in shards if not one.dims & first.dims)
        said = f"along dims {set(first.dims)} and {set(other.dims)}"
        return op.wrong(f"combines shards over AXIS {said}")
    for aval, value in zip(op.ins, op.values, strict=True):
        equal = isinstance(value.kind, k.Whole | k.Count)
        if equal and any(op.out.shape[dim] != 1 for dim in dims):
            dims &= value.constant | _broadcast(op, aval)
    if not dims:
        return op.wrong(
            "combines rows that are split over AXIS with values that differ along that dim but "
            "are the same on every device (equal random keys, or positions that count from 0 on "
            "each device)"
        )
    inner = {found.inner for found in shards}
    return k.Shard(dims, inner.pop() if len(inner) == 1 else 1)


RULES_OF: dict[type[k.Kind], Callable[[Op], k.Kind]] = {
    k.Multiple: _of_multiple,
    k.Rank: _of_rank,
    k.Owed: _of_owed,
    k.Extreme: _of_extreme,
    k.Shard: _of_shards,
}
"""The rules by the kind that any operand has. The first kind that is found decides."""
