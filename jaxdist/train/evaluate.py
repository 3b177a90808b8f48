"""Means over a held-out split, exact for any batch size and number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax

from jaxdist.errors import RunError
from jaxdist.models.loss import Batch
from jaxdist.train.step import Program
from jaxdist.types import Buffers, Params


def evaluate(
    program: Program, params: Params, buffers: Buffers, batches: Iterable[Batch]
) -> dict[str, float]:
    """Each of the loss's means over all rows that have weight; NaN where none has any for it.

    Args:
      params: trained parameters, as the program stores them.
      batches: padded batches, as `Loader.evaluation_batches` gives them.

    Raises:
      RunError: no row has weight for the loss itself.
    """
    parts = [program.evaluate(params, buffers, batch) for batch in batches]
    # Added as Python floats (64 bits), in order: the result does not depend on the batch count.
    fetched = jax.device_get(parts)
    totals: dict[str, tuple[float, float]] = {}
    for sums in fetched:
        for name, mean in sums.items():
            total, weight = totals.get(name, (0.0, 0.0))
            totals[name] = (total + float(mean.total), weight + float(mean.weight))
    if not totals.get("loss", (0.0, 0.0))[1]:
        raise RunError(
            f"held-out loss: all that the split gives weighs 0 ({len(parts)} batches were read), "
            "so that there is nothing to take the mean of; give some held-out example a 'weight' "
            "above 0, or none at all"
        )
    return {
        name: total / weight if weight else math.nan for name, (total, weight) in totals.items()
    }
