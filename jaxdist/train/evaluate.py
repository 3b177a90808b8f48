"""The means of a loss over a held-out split, exact for any batch size and number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.errors import RunError
from jaxdist.models.feed_forward.measure import LOAD
from jaxdist.models.feed_forward.router import violation
from jaxdist.models.loss import Batch, Sums, training_sums
from jaxdist.models.mean import Mean, check_adds_up
from jaxdist.train.step import Program
from jaxdist.types import Buffers, Params

AT_ONCE = 8
"""The maximum number of batches that may be evaluated together as one batch, for a loss that
returns scalars. Because evaluation computes no gradients, such a batch needs less memory than in
training."""


def why_in_parts(rows: int, limit: int | None, batch_size: int, devices: int) -> str | None:
    """Return why a held-out split cannot be a single batch without padding, or None if it can be.

    Args:
      rows: the number of examples in the split.
      limit: the maximum number of batches to evaluate, or None without a limit.
      batch_size: the number of examples in a batch.
      devices: the number of devices that share a batch.

    >>> why_in_parts(96, None, 32, 8)
    >>> why_in_parts(100, None, 32, 8)
    '100 examples, which do not divide over 8 devices along data'
    >>> why_in_parts(1000, None, 32, 8)
    '1000 examples, more than 8 batches of 32 that may be computed at once'
    """
    rows = rows if limit is None else min(rows, limit * batch_size)
    if rows % devices:
        return f"{rows} examples, which do not divide over {devices} devices along data"
    if rows > AT_ONCE * batch_size:
        return (
            f"{rows} examples, more than {AT_ONCE} batches of {batch_size} that may be computed at "
            "once"
        )
    return None


def _check_scalars(parts: Sequence[Sums], rows: int) -> None:
    """Refuse a loss that returns scalars if there are several batches, or a batch has padding.

    Args:
      parts: the sums of each batch.
      rows: the number of rows of a batch.

    Raises:
      ConfigError: the loss returns scalars, as found by `check_adds_up`.
    """
    for sums in parts:
        if len(parts) > 1:
            check_adds_up(sums, f"the split is evaluated in {len(parts)} batches")
        if float(sums["loss"].weight) != rows:
            check_adds_up(sums, f"some of the {rows} rows of the batch are padding")


def evaluate(
    program: Program, params: Params, buffers: Buffers, batches: Iterable[Batch]
) -> dict[str, float]:
    """Return the weighted mean of each value of a loss over all rows, by name.

    A mean is NaN if all its weights are 0. For a model with routers, `max_vio` of the worst layer
    and `max_vio_mean` over all layers are computed from the load over the complete split.

    Args:
      params: the parameters to evaluate, in the form in which the program stores them.
      batches: padded batches, as `Loader.evaluation_batches` yields them.

    Raises:
      RunError: all weights of the value `loss` are 0.
      ConfigError: the loss returns scalars, and the split is not a single batch without padding.
    """
    parts: list[Sums] = []
    rows = 0
    for batch in batches:
        rows = len(next(iter(batch.values())))
        parts.append(program.evaluate(params, buffers, batch))
    # All batches are dispatched before the first sums are fetched. The sums are added in order as
    # Python floats (64 bits), so that the result does not depend on the number of batches.
    fetched = jax.device_get(parts)
    _check_scalars(fetched, rows)
    first = fetched[0] if fetched else {}
    whole = {name for name, one in first.items() if not isinstance(one, Mean)}
    totals: dict[str, tuple[float, float]] = {}
    load: Any = np.zeros((1, 1))
    for sums in map(training_sums, fetched):
        for name, mean in sums.items():
            # The load is not a mean: it has a number for each layer and expert. It is therefore
            # summed apart from the means.
            if name == LOAD:
                load = load + np.asarray(mean.total, np.float64)
                continue
            total, weight = totals.get(name, (0.0, 0.0))
            totals[name] = (total + float(mean.total), weight + float(mean.weight))
    if not totals.get("loss", (0.0, 0.0))[1]:
        raise RunError(
            f"held-out loss: all examples of the split have weight 0 ({len(parts)} batches were "
            "read), so the mean is undefined. Give some held-out example a 'weight' above 0, or "
            "give no example a 'weight'"
        )
    means = {
        name: total / weight if weight else math.nan for name, (total, weight) in totals.items()
    }
    if LOAD in first:
        worst = violation(load)
        means |= {"max_vio": float(worst.max()), "max_vio_mean": float(worst.mean())}
    for name in sorted(whole):
        # A metric such as AUC needs all parts of a split together.
        means[name] = type(first[name]).value([sums[name] for sums in fetched])
    return means
