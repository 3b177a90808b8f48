"""Settings that combine but do nothing."""

from __future__ import annotations

from jaxdist.parallel.validity.table import Facts, shown_mesh, shown_reduce, shown_stage
from jaxdist.parallel.zero import Zero


def notices(facts: Facts, plan: Zero | None) -> list[str]:
    """Settings that combine but do nothing, with the reason; a sentence each.

    Args:
      plan: what ZeRO splits.
    """
    found = []
    zero, mesh, parts = facts.zero, shown_mesh(facts), facts.parts(facts.state_axes)
    if zero.stage and parts == 1:
        axes = ", ".join(facts.state_axes)
        found.append(
            f"{shown_stage(facts)} has no effect: {axes} of {mesh} has size 1, so that nothing is "
            "split"
        )
    elif plan is not None and all(dim is None for dim in plan.dims.values()):
        found.append(
            f"{shown_stage(facts)} has no effect: no parameter has {zero.whole_below} elements or "
            f"more (parallel.zero.whole_below) and a dim that divides by {parts}"
        )
    elif plan is not None and plan.uneven:
        (name, shape), *more = plan.uneven.items()
        also = f" and {len(more)} more" if more else ""
        found.append(
            f"{shown_stage(facts)} keeps {name} {list(shape)}{also} whole on every device: no dim "
            f"divides by {parts} ({', '.join(facts.state_axes)}), and those that zeros could fill "
            "up would more than double, or are split by another axis; a size that divides would "
            "be split"
        )
    if zero.scope == "ici" and not zero.stage:
        found.append("parallel.zero.scope ici has no effect at parallel.zero.stage 0")
    if facts.reduce is not None and facts.parts(facts.batch_axes) == 1:
        axes = ", ".join(facts.batch_axes)
        found.append(f"{shown_reduce(facts)} has no effect: {axes} of {mesh} has size 1")
    if facts.reduce_dtype is not None and facts.reduction is None:
        narrow = f"parallel.reduce_dtype {facts.reduce_dtype} has no effect"
        found.append(
            f"{narrow} with parallel.reduce null: XLA sums gradients in their own dtype; set "
            "parallel.reduce: {type: xla}"
            if facts.batch_axes
            else f"{narrow}: no axis of {mesh} splits the batch, so that no gradients are summed"
        )
    if facts.pipeline and facts.stages == 1:
        has = "has" if len(facts.pipeline) == 1 else "have"
        found.append(
            f"{' and '.join(facts.pipeline)} {has} no effect: {mesh} has one stage; set mesh.stage"
        )
    if facts.local_statistics and facts.reduce is None:
        found.append(
            "parallel.batch_norm local has no effect with parallel.reduce null: XLA computes with "
            "the whole batch as one array; set parallel.reduce: {type: xla}"
        )
    gathers = zero.stage == 3 and facts.reduce is not None
    for name, value, unset in (
        ("gather_dtype", zero.gather_dtype, None),
        ("prefetch", str(zero.prefetch).lower(), "false"),
    ):
        if value != unset and not gathers:
            found.append(
                f"parallel.zero.{name} {value} has no effect with {shown_stage(facts)} and "
                f"{shown_reduce(facts)}: only stage 3 with an explicit reduction gathers parameters"
            )
    found += [
        f"mesh axis {name} of size {facts.mesh[name]} has no effect: no rule splits anything over "
        f"it, so that its devices all do the same"
        for name in facts.empty_axes
    ]
    return found
