"""The cost of attention in plans that share each sequence among several devices (axis context)."""

from __future__ import annotations

from jaxdist.cost.context import ContextNeeds, SequenceSplit, best_split, splits_of
from jaxdist.cost.kernels import LANES
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Places, Target, ring_hops

LONG = 16_384
"""The length of the shortest sequences that the search shares among devices, in tokens."""

PIECEWISE = 0.3
"""The fraction of the peak that attention is assumed to reach if plain jax computes it block by
block. The number was not read from compiled programs. It only ranks such plans after plans with
kernels for whole sequences."""
PRODUCTS = 2, 5
"""The numbers of attention's matrix products in the forward and in the backward pass."""


def needs_of(model: Decoder, plan: Plan, target: Target, rows: int) -> ContextNeeds:
    """Return the sizes from which the costs of attention in a block are computed.

    Args:
      model: the model for which the plan is made.
      plan: the plan whose time is computed.
      target: the chips.
      rows: the number of sequences that the devices share.
    """
    return ContextNeeds(
        heads=model.heads // plan.tensor,
        kv_heads=model.kv_heads // plan.tensor,
        head_dim=model.head_dim,
        length=model.window,
        rows=rows,
        itemsize=model.width,
        window=model.span,
        gathers=target.is_tpu and model.window % (plan.context * LANES) == 0,
        rotates=plan.stage == 1,
    )


def split_of(model: Decoder, plan: Plan, target: Target, rows: int) -> SequenceSplit | None:
    """Return the algorithm with which devices share `rows` sequences.

    The result is the algorithm that `sharding.context: auto` chooses. The result is None if no
    algorithm is possible.
    """
    needs = needs_of(model, plan, target, rows)
    found = best_split(splits_of("auto", ("context",), plan.context), needs)
    return None if found is None else found[0]


def context_refusal(model: Decoder, plan: Plan) -> str | None:
    """Return the reason why the axis context of a plan is invalid, or None if it is valid.

    A plan without axis context is valid.
    """
    if plan.context == 1:
        return None
    if model.window % (2 * plan.context * plan.tensor):
        return "the sequence does not divide over axes context and tensor"
    if model.adapters:
        return "no formula covers adapters together with axis context"
    if plan.shares_embed and model.embed % plan.context:
        return "the width does not divide over axis context"
    return None


def piecewise(model: Decoder, plan: Plan, target: Target, rows: int) -> tuple[float, float] | None:
    """Return the times of the two passes of attention that plain jax computes block by block.

    The unit is an ideal forward pass, which computes all products at the peak, including products
    that the mask discards. The first time is for the forward pass. The result is None if a kernel
    computes attention instead. There are kernels for whole sequences and, on TPUs, for gathered
    keys.

    Args:
      model: the model for which the plan is made.
      plan: the plan whose time is computed.
      target: the chips.
      rows: the number of sequences that the devices share.
    """
    split = None if plan.context == 1 else split_of(model, plan, target, rows)
    if split is None or split.groups == 1:
        return None
    if needs_of(model, plan, target, rows).gathers and not split.rotates:
        return None
    seen = 0.5 if model.span is None else min(0.5, model.span / model.window)
    ahead, back = (seen * count / 2 / PIECEWISE for count in PRODUCTS)
    return ahead, back


def context_seconds(model: Decoder, plan: Plan, places: Places, target: Target, rows: int) -> float:
    """Return the seconds that a block waits for exchanges of keys, values and heads, in all passes.

    The exchanges are assumed not to overlap with computation. If attention
    is recomputed, the exchanges of the forward pass are repeated.

    Args:
      model: the model for which the plan is made.
      plan: the plan whose time is computed.
      places: the layout of the plan's mesh on the torus.
      target: the chips.
      rows: the number of sequences that the devices share.
    """
    split = None if plan.context == 1 else split_of(model, plan, target, rows)
    if split is None:
        return 0.0
    ahead, back = needs_of(model, plan, target, rows).bytes_received(split)
    passes = (1 if "attention" in plan.kept else 2) * ahead + back
    dims = places.inner_dims
    rate = target.link_rate(dims)
    if split.way == "ring":
        return passes * ring_hops(target, dims) / rate
    seconds = passes / (rate * target.ports(dims))
    # An exchange for heads passes several links: on average half of the longest path.
    return seconds * max(1.0, target.hops(dims) / 2) if split.swapped > 1 else seconds
