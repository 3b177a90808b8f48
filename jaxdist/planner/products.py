"""The time of a block's matrix products, from a table of products that were compiled one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxdist.cost.products import product_share
from jaxdist.planner.model import Decoder, PlannedParameter
from jaxdist.planner.plan import Plan
from jaxdist.planner.target import Target


def block_seconds(
    model: Decoder, plan: Plan, target: Target, tokens: float, otherwise: float
) -> float:
    """Return the seconds of a block's forward matrix products on a single device.

    The assumed fraction of the peak is the mean of two fractions: the fraction of the forward
    product, and the fraction of the backward product for the gradient of the input. The backward
    product contracts the other dim of the weight.

    Args:
      model: the model with the sizes of the products.
      plan: the plan, whose axis tensor splits weights.
      target: the chips.
      tokens: the number of tokens that the device multiplies.
      otherwise: the fraction of the peak on devices without a table in `jaxdist.cost.products`.
    """
    peak = peak_of(target, narrow=model.narrow)
    spent = 0.0
    for one in model.tensors:
        if not one.stacked or len(one.shape) < 2:
            continue
        # In the matrix product, the dims heads and head size are a single dim.
        rows, columns = _as_matrix(one, plan.tensor)
        both = [(rows, columns), (columns, rows)]
        share_of_peak = mean_share(target, both, otherwise, scoped=model.scoped)
        spent += 2.0 * math.prod(one.shape) / (peak * share_of_peak)
    return tokens * spent


def _as_matrix(one: PlannedParameter, tensor: int) -> tuple[int, int]:
    """Return the size of the contracted dim, and the number of columns, of a weight on a device.

    Args:
      one: the weight.
      tensor: the size of axis tensor.
    """
    cut = 1 if one.split is None else tensor
    first = one.shape[0] if one.split != 0 else one.shape[0] // cut
    rest = math.prod(one.shape[1:]) if one.split == 0 else math.prod(one.shape[1:]) // cut
    # Attention's output projection contracts two dims, heads and head size.
    if one.name == "out":
        return first * one.shape[1], one.shape[2]
    return first, rest


def mean_share(
    target: Target, products: Sequence[tuple[int, int]], otherwise: float, *, scoped: bool
) -> float:
    """Return the mean fraction of the peak that several products of equal FLOPs reach.

    Args:
      target: the chips.
      products: pairs of the sizes of a product's contracted dim and of its columns.
      otherwise: the result if a product is not in the table of the device.
      scoped: whether products have more vector memory than libtpu's default.
    """
    found = [product_share(target.device.name, k, n, scoped=scoped) for k, n in products]
    known = [share for share in found if share is not None]
    if len(known) < len(found):
        return otherwise
    # The mean is harmonic, since times add up, and a time is FLOPs divided by the fraction.
    return len(known) / sum(1 / share for share in known)


def peak_of(target: Target, *, narrow: bool) -> float:
    """Return the peak FLOPs per second of matrix products.

    A device whose peak in float32 is unknown has the peak of bfloat16: by default, TPUs round
    float32 factors to bfloat16.

    Args:
      target: the chips.
      narrow: whether the factors are two-byte numbers instead of float32.
    """
    found = target.device.flops_per_second
    return found["bfloat16"] if narrow else found.get("float32", found["bfloat16"])
