"""The table of rules. A rule derives the kinds of an operation's results from its operands."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxdist.errors import JaxdistError, did_you_mean
from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types import products, shapes
from jaxdist.proofs.types.elementwise import ELEMENTWISE, common, elementwise
from jaxdist.proofs.types.op import Found, Op, Rule


def along(op: Op) -> Found:
    """Return the kind of the results of an operation along a dim, such as a cumulative sum.

    If the equation does not state the dim, the operation is along the last dim. Partial sums remain
    partial sums only under a cumulative sum, which is linear.
    """
    dim = next((op.params[name] for name in ("axis", "dimension") if name in op.params), -1)
    ndim = op.ins[0].ndim
    if op.name == "cumsum" and op.has(k.Owed):
        return k.OWED
    return k.ZERO if {*op.kinds} == {k.ZERO} else apart(op, {*range(ndim)} - {dim % ndim})


def apart(op: Op, dims: Collection[int]) -> k.Kind:
    """Return the kind of the results of an operation that treats rows along `dims` separately.

    The result is a shard along each dim in `dims` along which every sharded operand is a shard. An
    operand that is a partial sum is an error.
    """
    label = label_of(op.eqn)
    if op.has(k.Owed):
        return op.wrong(f"gives {label} a partial sum over AXIS")
    if op.all(k.SAME | k.APART):
        return k.OWN if op.has(k.APART) else k.WHOLE
    if not op.all(k.SAME | k.APART | k.Shard):
        return op.no_rule(f"{label} of operands that are {' and '.join(map(str, op.kinds))}")
    kept, others = common(op.kinds) & {*dims}, " or ".join(map(str, sorted(dims)))
    said = f"{label} of shards along a dim that is not {others}"
    return k.Shard(kept) if kept else op.no_rule(said)


def bitcast(op: Op) -> Found:
    """Return the kind of an array whose bits are read as another dtype."""
    keeps = op.all(k.SAME | k.Own | k.Shard)
    return op.kinds[0] if keeps else op.no_rule(f"the bits of a value that is {op.kinds[0]}")


def by_default(op: Op) -> Found:
    """Return the kind of the results of an operation without a rule.

    The results are whole if all operands are whole, and otherwise undecided.
    """
    label = label_of(op.eqn)
    no_rule = f"{label} has no rule: see jaxdist.proofs.rule({label!r})"
    return k.WHOLE if op.all(k.SAME) else op.undecided(no_rule)


def label_of(eqn: Any) -> str:
    """Return the name under which `RULES` has the rule for an operation.

    For most operations, the result is the name of the primitive. A Pallas kernel is named
    `pallas_call:NAME`, and foreign code `ffi_call:TARGET`.
    """
    name = eqn.primitive.name
    kernel = eqn.params.get("name_and_src_info", eqn.params.get("name"))
    called = eqn.params.get("target_name") or getattr(kernel, "name", kernel)
    return f"{name}:{called}" if name in KERNELS and called else name


def rule(name: str, *, like: str | None = None, rows: int | None = None) -> None:
    """Add a rule for an operation that has none, such as a Pallas kernel.

    Exactly one of `like` and `rows` must be given.

    Args:
      name: the operation's name, which the reason for an undecided value states.
      like: the primitive of jax whose rule the operation gets, such as "tanh" for an elementwise
        operation, or None if `rows` is given.
      rows: the index of a dim that all operands and results have, such as the batch of an attention
        kernel, or None if `like` is given. Rows along the dim must not depend on each other.

    Raises:
      JaxdistError: neither or both of `like` and `rows` are given, or `like` has no rule.
    """
    if (like is None) == (rows is None):
        raise JaxdistError(f"rule {name!r}: give like=PRIMITIVE or rows=DIM, one of the two")
    if like is not None and like not in RULES:
        known = did_you_mean(like, RULES)
        raise JaxdistError(f"rule {name!r}: like={like!r} has no rule; {known}")
    RULES[name] = RULES[like] if like is not None else lambda op: apart(op, {rows or 0})


KERNELS = ("pallas_call", "ffi_call", "custom_call", "custom_partitioning")
"""The primitives that call a kernel. The name of the kernel is part of the operation's name in
`RULES`."""
_ALONG = "cumsum cummax cummin cumprod cumlogsumexp sort top_k"
_RANDOM = ["seed", "wrap", "unwrap", "fold_in", "split", "bits", "clone"]
_KEYS = ["threefry2x32", *(f"random_{name}" for name in _RANDOM)]
_REDUCED = "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin"
_SHAPES = "reshape concatenate stack unstack pad dynamic_slice dynamic_update_slice"
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **{name: getattr(shapes, name) for name in _SHAPES.split()},
    **dict.fromkeys(("slice", "rev", "split"), shapes.same_dims),
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze"), shapes.renumbered),
    **dict.fromkeys(_REDUCED.split(), shapes.reduction),
    "reduce": shapes.additions,
    "dot_general": products.dot_general,
    "conv_general_dilated": products.convolution,
    "gather": products.gather,
    "scatter-add": products.scatter_add,
    "scatter": products.scatter,
    "bitcast_convert_type": bitcast,
    # The elements of an iota differ only along the dim that it counts.
    "iota": lambda op: k.Value(k.WHOLE, op.every - {op.params["dimension"]}),
    **dict.fromkeys(_ALONG.split(), along),
    # Random keys and bits are the same on every device unless a key or counter differs.
    **dict.fromkeys(_KEYS, lambda op: k.OWN if op.has(k.APART | k.Shard) else k.WHOLE),
}
"""The rules by the name of the primitive, or by the name of a kernel that `label_of` returns."""
