"""The table of rules, which derive the kinds of a primitive's results from its operands' kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.errors import JaxdistError, did_you_mean
from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types import products, shapes
from jaxdist.proofs.types.elementwise import (
    ELEMENTWISE,
    Context,
    Found,
    Rule,
    all_constant,
    elementwise,
)


def iota(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of an iota: whole, and constant along all dims except its own."""
    dims = all_constant(eqn.outvars[0].aval)
    return k.Value(k.WHOLE, dims - {eqn.params["dimension"]})


def along(axis_of: Callable[[Any], set[int]], linear: bool) -> Rule:
    """Return the rule of an operation along some dims, such as a cumulative sum or a sort.

    Args:
      axis_of: a function from an equation to the dims along which it operates.
      linear: whether the operation is linear, so that partial sums remain partial sums.
    """

    def rule(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
        dims, kind = axis_of(eqn), _kind_along(at, eqn, values, linear)
        if isinstance(kind, k.Shard):
            left = kind.dims - dims
            kind = k.Shard(left, kind.inner) if left else at.undecided(
                eqn, f"{eqn.primitive.name} along a sharded dim"
            )  # fmt: skip
        return kind

    return rule


def _kind_along(at: Context, eqn: Any, values: Sequence[k.Value], linear: bool) -> k.Kind:
    kinds = {value.kind for value in values}
    if any(isinstance(kind, k.Owed) for kind in kinds) and not (linear and len(kinds) == 1):
        return at.wrong(eqn, f"takes {eqn.primitive.name} of a partial sum over {at.axis!r}")
    shards = [kind for kind in kinds if isinstance(kind, k.Shard)]
    if shards:
        dims = frozenset.intersection(*(one.dims for one in shards))
        return k.Shard(dims) if dims else at.undecided(eqn, "shards along unlike dims")
    if kinds == {k.ZERO}:
        return k.ZERO
    return k.OWN if kinds & {k.OWN} or any(isinstance(one, k.Rank) for one in kinds) else k.WHOLE


def bitcast(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kind of an array whose bits are read in another dtype."""
    kind = values[0].kind
    keeps = isinstance(kind, k.Whole | k.Zero | k.Count | k.Own | k.Shard)
    return kind if keeps else at.undecided(eqn, f"the bits of {kind}")


def random_numbers(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kinds of random keys and bits: each device's own if any operand differs."""
    own = any(isinstance(value.kind, k.Own | k.Rank | k.Shard) for value in values)
    return k.OWN if own else k.WHOLE


def by_default(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
    """Return the kinds of an operation without a rule: whole if all operands are, or undecided."""
    if all(isinstance(value.kind, k.Whole | k.Zero | k.Count) for value in values):
        return k.WHOLE
    label = label_of(eqn)
    return at.undecided(eqn, f"{label} has no rule: see jaxdist.proofs.rule({label!r})")


def label_of(eqn: Any) -> str:
    """Return the name of an operation in `RULES`, which is its primitive's or its kernel's name.

    A Pallas kernel is named `pallas_call:NAME`, and foreign code `ffi_call:TARGET`.
    """
    name = eqn.primitive.name
    kernel = eqn.params.get("name_and_src_info", eqn.params.get("name"))
    called = eqn.params.get("target_name") or getattr(kernel, "name", kernel)
    return f"{name}:{called}" if name in KERNELS and called else name


def rule(name: str, *, like: str | None = None, rows: int | None = None) -> None:
    """Add a rule for an operation that has none, such as a Pallas kernel.

    Args:
      name: the operation's name, which the reason for an undecided value states.
      like: a primitive of jax with the same rule, such as "tanh" for an elementwise operation.
      rows: a dim that every operand and result has, along which rows do not depend on each other,
        such as the batch of an attention kernel.

    Raises:
      JaxdistError: neither or both of `like` and `rows` are given, or `like` has no rule.
    """
    if (like is None) == (rows is None):
        raise JaxdistError(f"rule {name!r}: give like=PRIMITIVE or rows=DIM, one of the two")
    if like is not None and like not in RULES:
        raise JaxdistError(f"rule {name!r}: {like!r} has none: {did_you_mean(like, RULES)}")
    RULES[name] = RULES[like] if like is not None else _by_rows(int(rows or 0))


def _by_rows(dim: int) -> Rule:
    def found(at: Context, eqn: Any, values: Sequence[k.Value]) -> Found:
        kinds = [value.kind for value in values]
        label, shards = label_of(eqn), [one for one in kinds if isinstance(one, k.Shard)]
        if any(isinstance(one, k.Owed | k.Extreme) for one in kinds):
            return at.wrong(eqn, f"gives {label} a partial sum over {at.axis!r}")
        if not all(dim in one.dims for one in shards):
            return at.undecided(eqn, f"{label} of shards along a dim that is not {dim}")
        own = any(isinstance(one, k.Own | k.Rank) for one in kinds)
        return k.shard(dim) if shards else k.OWN if own else k.WHOLE

    return found


KERNELS = ("pallas_call", "ffi_call", "custom_call", "custom_partitioning")
"""Primitives that call a kernel, whose name is part of the operation's name."""
EACH: dict[str, Rule] = {"optimization_barrier": lambda at, eqn, values: list(values)}
"""The rules of operations whose results do not depend on all operands."""
_RANDOM = ["seed", "wrap", "unwrap", "fold_in", "split", "bits", "clone"]
_REDUCED = ("sum", "max", "min", "and", "or", "prod")
_SHAPES = (
    "broadcast_in_dim transpose reshape squeeze expand_dims concatenate stack unstack "
    "dynamic_slice dynamic_update_slice"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **{name: getattr(shapes, name) for name in _SHAPES.split()},
    **dict.fromkeys(("pad", "slice", "rev", "split"), shapes.same_dims),
    **{f"reduce_{name}": shapes.reduction(name) for name in _REDUCED},
    **{name: shapes.reduction(name) for name in ("argmax", "argmin")},
    "dot_general": products.dot_general,
    "conv_general_dilated": products.convolution,
    "gather": products.gather,
    "scatter-add": products.scatter_add,
    "scatter": products.scatter,
    "bitcast_convert_type": bitcast,
    "iota": iota,
    "cumsum": along(lambda eqn: {eqn.params["axis"]}, linear=True),
    **dict.fromkeys(
        ("cummax", "cummin", "cumprod", "cumlogsumexp"),
        along(lambda eqn: {eqn.params["axis"]}, linear=False),
    ),
    "sort": along(lambda eqn: {eqn.params["dimension"]}, linear=False),
    "top_k": along(lambda eqn: {eqn.invars[0].aval.ndim - 1}, linear=False),
    **dict.fromkeys(["threefry2x32", *(f"random_{name}" for name in _RANDOM)], random_numbers),
}
"""The rules by the name of the primitive, or by the name of a kernel that `label_of` returns."""
