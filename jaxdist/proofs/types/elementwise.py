"""The rules of elementwise operations, and the interface of all rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxdist.proofs.types import kinds as k


class Context(Protocol):
    """The part of a `Pass` that a rule may use."""

    axis: str
    size: int
    scheduled: frozenset[str]
    chosen: bool
    begun: dict[str, tuple[k.Kind, int]]

    def wrong(self, eqn: Any, message: str) -> k.Kind:
        """Report an error at an equation, and return the kind of its results."""
        ...

    def wrong_at(self, where: str, message: str) -> k.Kind:
        """Report an error at a place, and return the kind of a wrong value."""
        ...

    def place(self, eqn: Any) -> str:
        """Return the file and line of an equation."""
        ...

    def too_large(self, where: str) -> k.Kind:
        """Report that the sum at a place adds equal values of all devices; return `Wrong`."""
        ...

    def undecided(self, eqn: Any, message: str) -> k.Unknown:
        """Return `Unknown`, the kind of a result to which no rule applies, with the reason."""
        ...


Found = k.Kind | k.Value | list[k.Value]
"""The results of an operation: a kind or a value that all have, or each by itself."""
Rule = Callable[[Context, Any, Sequence[k.Value]], Found]
"""A function from an equation and the kinds of its operands to the kinds of its results."""


_LINEAR = (
    "add sub add_any neg mul div select_n convert_element_type copy copy_p real imag complex conj "
    "reduce_precision optimization_barrier stop_gradient name pvary pcast reshard "
    "sharding_constraint"
)
LINEAR = frozenset(_LINEAR.split())
"""Elementwise operations that give a partial sum for a partial sum, if other operands allow it."""
_OTHERS = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos "
    "cosh digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mulhi ne nextafter not or polygamma "
    "population_count pow regularized_incomplete_beta rem round rsqrt shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh "
    "xor"
)
ELEMENTWISE = LINEAR | frozenset(_OTHERS.split())
"""All elementwise operations."""
_MOVING = "reshape broadcast_in_dim transpose squeeze expand_dims slice split concatenate"
MOVING = frozenset(_MOVING.split())
KEEPING = ELEMENTWISE | MOVING
"""Operations that a program may apply to a sum before the division that makes the sum a mean."""


def all_constant(aval: Any) -> frozenset[int]:
    """Return all dims of an array, as the dims along which a constant array is constant."""
    return frozenset(range(aval.ndim))


def elementwise(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kinds of the results of an elementwise operation."""
    shape = eqn.outvars[0].aval.shape
    constants = []
    for var, value in zip(eqn.invars, values, strict=True):
        full = var.aval.shape == shape
        constants.append(value.constant if full else frozenset(range(len(shape))))
    constant = frozenset(range(len(shape))).intersection(*constants)
    return [k.Value(_elementwise(at, eqn, values), constant)] * len(eqn.outvars)


def _elementwise(at: Context, eqn: Any, values: Sequence[k.Value]) -> k.Kind:
    name = eqn.primitive.name
    kinds = [value.kind for value in values]
    if any(isinstance(kind, k.Joined) for kind in kinds):
        return _of_joined(at, eqn, values)
    spoilt = k.spoiled(kinds)
    if spoilt is not None:
        return spoilt
    if name in ("mul", "and") and any(isinstance(kind, k.Zero) for kind in kinds):
        return k.ZERO
    if all(isinstance(kind, k.Zero) for kind in kinds) and name in LINEAR - {"div"}:
        return k.ZERO
    if name == "select_n" and isinstance(kinds[0], k.Zero):
        return kinds[1]  # the predicate is False everywhere, which selects the first case
    multiples = [kind for kind in kinds if isinstance(kind, k.Multiple)]
    if multiples:
        if name in LINEAR and len(kinds) == 1:
            return kinds[0]
        if _shares(at, eqn) == 1 and isinstance(kinds[0], k.Multiple):
            return k.WHOLE
        return at.too_large(multiples[0].where)
    terms = [kind for kind in kinds if isinstance(kind, k.Terms)]
    if terms:
        same = name in LINEAR and all(
            kind == terms[0] or isinstance(kind, k.Zero) for kind in kinds
        )
        return terms[0] if same else at.undecided(eqn, f"{name} of {terms[0]}")
    if any(isinstance(kind, k.Rank) for kind in kinds):
        if _scalars(eqn):
            return _of_rank(eqn, kinds)
        kinds = [k.OWN if isinstance(kind, k.Rank) else kind for kind in kinds]
    if any(isinstance(kind, k.Owed) for kind in kinds):
        return _of_owed(at, eqn, kinds)
    if any(isinstance(kind, k.Extreme) for kind in kinds):
        return _of_extreme(at, eqn, kinds)
    shards = [kind for kind in kinds if isinstance(kind, k.Shard)]
    if shards:
        return _of_shards(at, eqn, values, shards)
    if name in ("div", "mul") and _even(at, eqn, kinds):
        return k.COUNT
    if any(isinstance(kind, k.Own) for kind in kinds):
        return k.OWN
    counts = any(isinstance(kind, k.Count) for kind in kinds) and all(
        isinstance(kind, k.Count)
        or var.aval.shape == ()
        or value.constant == all_constant(var.aval)
        for kind, var, value in zip(kinds, eqn.invars, values, strict=True)
    )
    return k.COUNT if counts else k.WHOLE


def _even(at: Context, eqn: Any, kinds: Sequence[k.Kind]) -> bool:
    """Return whether an equation divides a whole value by the number of devices.

    The sum of the quotients over all devices is the value, so that a quotient may be added to a
    partial sum.
    """
    return isinstance(kinds[0], k.Whole) and _shares(at, eqn) >= 1


def _shares(at: Context, eqn: Any) -> int:
    """Return n if an equation divides by n times the number of devices, a constant; otherwise 0."""
    factor = getattr(eqn.invars[-1], "val", None)
    if factor is None or eqn.primitive.name not in ("div", "mul") or at.size == 1:
        return 0
    copies = float(factor) if eqn.primitive.name == "div" else 1 / (float(factor) or math.inf)
    times = round(copies / at.size)
    return times if abs(copies / at.size - times) < 1e-6 else 0


def _of_joined(at: Context, eqn: Any, values: Sequence[k.Value]) -> k.Kind:
    """Return the kind of an elementwise operation on joined arrays, part by part.

    The other operands must be joined in the same way, or be whole.
    """
    (first, *_) = (value.kind for value in values if isinstance(value.kind, k.Joined))
    parts = []
    for place, (size, _) in enumerate(first.parts):
        mine = []
        for var, value in zip(eqn.invars, values, strict=True):
            kind = value.kind
            if isinstance(kind, k.Joined):
                if kind.dim != first.dim or [s for s, _ in kind.parts] != [
                    s for s, _ in first.parts
                ]:
                    return at.undecided(eqn, "arrays that are joined in unlike ways")
                kind = kind.parts[place][1]
            elif isinstance(kind, k.Shard):
                return at.undecided(eqn, f"{eqn.primitive.name} of joined arrays and a shard")
            mine.append(
                k.Value(kind, all_constant(var.aval) if not var.aval.shape else value.constant)
            )
        parts.append((size, _elementwise(at, eqn, mine)))
    return merged(first.dim, parts)


def merged(dim: int, parts: Sequence[tuple[int, k.Kind]]) -> k.Kind:
    """Return the kind of arrays that are joined along a dim: `Joined`, or the kind of all parts."""
    flat: list[tuple[int, k.Kind]] = []
    for size, kind in parts:
        flat += kind.parts if isinstance(kind, k.Joined) and kind.dim == dim else [(size, kind)]
    kinds = {kind for _, kind in flat}
    others = kinds - {k.ZERO}
    # Zeros may count as any kind, but are merged only with partial sums, so that a later slice
    # which contains only zeros is still known to be zero.
    if len(kinds) == 1 or (len(others) == 1 and others <= {k.OWED}):
        return (others or kinds).pop()
    return k.Joined(dim, tuple(flat))


def _scalars(eqn: Any) -> bool:
    """Return whether an equation computes a scalar."""
    return eqn.outvars[0].aval.ndim == 0


def _of_rank(eqn: Any, kinds: Sequence[k.Kind]) -> k.Kind:
    """Return the kind of arithmetic on a device's index: `Rank` for a multiple, otherwise `Own`."""
    name = eqn.primitive.name
    if name in ("convert_element_type", "copy", "pvary"):
        return kinds[0]
    if name == "mul":
        for var, kind in zip(reversed(eqn.invars), kinds, strict=True):
            factor = getattr(var, "val", None)
            if isinstance(kind, k.Rank) and factor is not None:
                return k.Rank(kind.factor * int(factor))
    if name == "lt" and isinstance(kinds[0], k.Rank) and isinstance(kinds[1], k.Zero):
        return k.ZERO  # jnp asks whether an index is negative, which a device's index never is
    if name in ("add", "sub") and isinstance(kinds[0], k.Rank) and isinstance(kinds[1], k.Zero):
        return kinds[0]
    if name == "add" and isinstance(kinds[0], k.Zero) and isinstance(kinds[1], k.Rank):
        return kinds[1]
    return k.OWN


def _of_owed(at: Context, eqn: Any, kinds: Sequence[k.Kind]) -> k.Kind:
    """Return the kind of an operation on partial sums: a partial sum only if it is linear."""
    name = eqn.primitive.name
    if any(isinstance(kind, k.Own) for kind in kinds):
        return at.undecided(eqn, f"{name} of a partial sum with what differs between devices")
    owed = [isinstance(kind, k.Owed) for kind in kinds]
    zero = [isinstance(kind, k.Zero) for kind in kinds]
    whole = [isinstance(kind, k.Whole | k.Zero | k.Count) for kind in kinds]
    if name in ("add", "sub", "add_any"):
        if all(isinstance(kind, k.Owed | k.Zero | k.Count) for kind in kinds):
            return k.OWED
        other = next(one for one, a, b in zip(kinds, owed, zero, strict=True) if not a and not b)
        said = "a whole value" if isinstance(other, k.Whole) else str(other)
        more = f", which each of the {at.size} devices would add" if said == "a whole value" else ""
        return at.wrong(eqn, f"adds a partial sum over {at.axis!r} and {said}{more}")
    if name == "mul" and sum(owed) == 1 and all(a or b for a, b in zip(owed, whole, strict=True)):
        return k.OWED
    if name == "div" and owed[0] and whole[1]:
        return k.OWED
    if name == "div" and owed[1]:
        return at.wrong(
            eqn,
            f"divides by a partial sum over {at.axis!r}: the count or weight of this device's rows "
            "alone; sum it over the axis first",
        )
    if (
        name == "select_n"
        and whole[0]
        and all(a or b for a, b in zip(owed[1:], zero[1:], strict=True))
    ):
        return k.OWED
    if name in LINEAR and len(kinds) == 1:
        return k.OWED
    if name == "is_finite":
        return k.OWN
    if name in ("eq", "ne") and any(zero):
        # The usual guard against division by zero lets a device without weight divide by 1, which
        # is right only if the program multiplies by the same number later.
        return at.undecided(eqn, "asks whether the weight of this device's rows is zero")
    return at.wrong(
        eqn,
        f"takes {name} of a partial sum over {at.axis!r}, which is not linear: sum it over the "
        "axis first",
    )


def _of_extreme(at: Context, eqn: Any, kinds: Sequence[k.Kind]) -> k.Kind:
    name = eqn.primitive.name
    (found, *_) = (kind for kind in kinds if isinstance(kind, k.Extreme))
    if name in ("convert_element_type", "stop_gradient", "copy") or (
        name == found.name and all(kind == found for kind in kinds)
    ):
        return found
    return at.undecided(eqn, f"{name} of {found} over {at.axis!r}")


def _of_shards(
    at: Context, eqn: Any, values: Sequence[k.Value], shards: Sequence[k.Shard]
) -> k.Kind:
    dims = frozenset.intersection(*(found.dims for found in shards))
    if not dims:
        first, other = shards[0], next(one for one in shards if not one.dims & shards[0].dims)
        return at.wrong(
            eqn,
            f"combines shards over {at.axis!r} along dims {set(first.dims)} and {set(other.dims)}",
        )
    inner = {found.inner for found in shards}
    shape = eqn.outvars[0].aval.shape
    for var, value in zip(eqn.invars, values, strict=True):
        if not isinstance(value.kind, k.Whole | k.Count) or var.aval.shape != shape:
            continue
        wide = {dim for dim in dims if var.aval.shape[dim] != 1}
        if wide and not dims & value.constant:
            return at.wrong(
                eqn,
                f"combines rows that are split over {at.axis!r} with values that are the same on "
                f"every device and differ along that dim (equal random keys, or positions that "
                f"count from 0 on each device)",
            )
        dims = dims & value.constant if wide and dims & value.constant else dims
    return k.Shard(dims, inner.pop() if len(inner) == 1 else 1)
