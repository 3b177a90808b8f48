"""The check whether the values that leave a `shard_map` agree with its `out_specs`."""

from __future__ import annotations

import math
from typing import Any

from jaxdist.mesh import entry_names
from jaxdist.proofs.types import kinds as k

REMEDIES: dict[type[k.Kind], str] = {
    **dict.fromkeys((k.Owed, k.Part), "a psum over AXIS is missing"),
    k.Shard: "an all-gather over AXIS is missing, or AXIS in out_specs",
    k.Extreme: "a pmax or pmin over AXIS is missing",
    k.Rank: "each device keeps a different value",
}
"""The advice for a value that must leave whole, by the kind that it has instead."""


def dim_of_spec(spec: Any, axis: str) -> int | None:
    """Return the dim that an axis splits in an entry of `in_specs` or `out_specs`.

    The result is None if the axis splits no dim.
    """
    return next((dim for dim, entry in enumerate(spec or ()) if axis in entry_names(entry)), None)


def is_share(eqn: Any, spec: Any, made: Any) -> bool:
    """Return whether each device holds one term of a sum, as an operand of a `shard_map`.

    When jax transposes a `shard_map`, jax divides the gradient of a whole result by the number of
    devices that have the result. Inside of the transposed `shard_map`, jax sums the gradients of
    whole operands over the devices.

    Args:
      eqn: the equation of the `shard_map`.
      spec: the entry of `in_specs` for the operand.
      made: the division outside of the `shard_map` that computed the operand, or None without such
        a division.
    """
    if made is None or made.source_info.traceback != eqn.source_info.traceback:
        return False
    sizes, axes = eqn.params["mesh"].shape, eqn.params["newly_manual_axes"]
    copies = math.prod(sizes[axis] for axis in axes if dim_of_spec(spec, axis) is None)
    return getattr(made.invars[1], "val", None) == copies


def leaving(at: Any, value: k.Value, dim: int | None, eqn: Any) -> k.Kind:
    """Return the kind that a result of a `shard_map` has outside of the `shard_map`.

    The result is `Wrong` or `Unknown` if `out_specs` does not fit the kind of the value.

    Args:
      at: the `Pass`.
      value: the result inside the `shard_map`.
      dim: the dim along which `out_specs` joins the devices' arrays, or None for a whole result.
      eqn: the equation whose line is reported.
    """
    kind, where = value.kind, at.place(eqn)
    stacks = isinstance(kind, k.Part | k.Owed | k.Zero) and kind != k.CONTRACT
    fits = isinstance(kind, k.SAME) if dim is None else stacks or dim in value.held
    if fits or k.spoiled([kind]):
        return k.spoiled([kind]) or k.WHOLE
    if isinstance(kind, k.Multiple):
        where, message = kind.where, at.copies
    elif dim is None and kind in (k.OWN, k.DOUBTFUL, k.PART, k.MESSAGE, k.CONTRACT):
        return at.undecided(
            eqn, f"a value that is {kind} leaves the shard_map as a replicated value"
        )
    elif dim is None:
        remedy = REMEDIES.get(
            type(kind), "each joined part needs the collective that its kind lacks"
        )
        message = f"is returned as a replicated value, but is {kind} over AXIS: {remedy}"
    elif isinstance(kind, k.Whole):
        message = (
            f"is returned as shards along dim {dim}, but every device has the complete value: the "
            f"result has {at.size} copies of the value"
        )
    else:
        return at.undecided(eqn, f"a value that is {kind} leaves the shard_map as shards")
    return k.Wrong(frozenset([(where, message.replace("AXIS", repr(at.axis)))]))
