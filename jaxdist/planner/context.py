"""The cost of attention over a sequence that several devices share, for a plan."""

from __future__ import annotations

from jaxdist.cost.context import ContextNeeds, SequenceSplit, best_split, splits_of
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target, ring_hops

LONG = 16_384
"""The shortest sequence for which the search shares sequences among devices."""

PIECEWISE = 0.3
"""The assumed fraction of the peak of attention piece by piece, in plain jax. It was read from no
program: it only ranks such ways after kernels for whole sequences."""
PRODUCTS = 2, 5
"""The products of attention in the forward and in the backward pass."""


def needs_of(model: Decoder, plan: Plan, rows: int) -> ContextNeeds:
    """Return the attention of a device in a block, if it had `rows` whole sequences."""
    return ContextNeeds(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        length=model.window,
        rows=rows,
        itemsize=model.width,
        window=model.span,
    )


def split_of(model: Decoder, plan: Plan, rows: int) -> SequenceSplit | None:
    """Return the way in which devices share sequences, as `sharding.context: auto` chooses it."""
    found = best_split(splits_of("auto", ("context",), plan.context), needs_of(model, plan, rows))
    return None if found is None else found[0]


def context_refusal(model: Decoder, plan: Plan) -> str | None:
    """Return why a plan that shares sequences is invalid, or None for a valid plan."""
    if plan.context == 1:
        return None
    if plan.stage > 1:
        return "pipelines do not go with shared sequences"
    if plan.tensor > 1:
        return "no formula prices axis tensor with shared sequences"
    if model.window % (2 * plan.context):
        return "the sequence does not divide over axis context"
    if model.adapters:
        return "no formula splits adapters over axis context"
    if model.embed % plan.context:
        return "the width does not divide over axis context"
    return None


def piecewise(model: Decoder, plan: Plan, rows: int) -> tuple[float, float] | None:
    """Return the times of both passes, in units of an ideal forward pass with nothing masked.

    The result is None where each device has whole sequences, for which kernels exist.
    """
    split = None if plan.context == 1 else split_of(model, plan, rows)
    if split is None or split.groups == 1:
        return None
    seen = 0.5 if model.span is None else min(0.5, model.span / model.window)
    ahead, back = (seen * count / 2 / PIECEWISE for count in PRODUCTS)
    return ahead, back


def context_seconds(model: Decoder, plan: Plan, places: Places, target: Target, rows: int) -> float:
    """Return a block's waits for the exchange of keys, values and heads, in all passes.

    Nothing is assumed to overlap. A recomputed forward pass exchanges once more.
    """
    split = None if plan.context == 1 else split_of(model, plan, rows)
    if split is None:
        return 0.0
    ahead, back = needs_of(model, plan, rows).bytes_received(split)
    passes = (1 if "attention" in plan.kept else 2) * ahead + back
    dims = places.inner_dims
    rate = target.link_rate(dims)
    if split.way == "ring":
        return passes * ring_hops(target, dims) / rate
    seconds = passes / (rate * target.ports(dims))
    # What devices exchange for heads passes several links: half of the longest way on average.
    return seconds * max(1.0, target.hops(dims) / 2) if split.swapped > 1 else seconds
