"""Auxiliary losses of routers, their metrics, and the biases that balance the load.

Dims: B batch, L sequence, S statistics, N layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.router import SUMS, Statistics, corrected, violation
from jaxdist.models.mean import Mean, Sums, divisor
from jaxdist.types import Buffers

LOAD = "expert_load"
"""The name of the sums of the load, `[N, E]`."""
Settle = Callable[[Buffers, Sums], Buffers]
"""Function from the buffers after a step's passes, and the sums of its batch, to the next."""


class Auxiliary(NamedTuple):
    """The auxiliary losses of routers, and their metrics.

    Attributes:
      penalty: sum of the auxiliary losses, each times its coefficient, on the scale of the loss's
        total.
      sums: the metrics: means over tokens, and the load of each expert.
    """

    penalty: jax.Array
    sums: Sums


def auxiliary(statistics: Statistics, weight_BL: jax.Array, experts: ExpertsConfig) -> Auxiliary:
    """Add up the statistics of a batch; the penalty is a sum over layers, metrics are means."""
    weight, layers = weight_BL.sum(), len(statistics.load)
    totals = dict(zip(SUMS, statistics.sums.sum(0), strict=True))
    penalty = experts.balance * totals["balance_loss"] + experts.z_loss * totals["z_loss"]
    load_NE = jax.lax.stop_gradient(statistics.load.sum(1))
    sums = {
        name: Mean(jax.lax.stop_gradient(total) / layers, weight) for name, total in totals.items()
    }
    return Auxiliary(penalty, {**sums, LOAD: Mean(load_NE, weight)})


def settled(buffers: Buffers, sums: Sums, *, rate: float) -> Buffers:
    """Move the biases of all routers, which are the only buffers, by the load of a whole batch."""
    load_NE = sums[LOAD].total
    return jax.tree.map(lambda bias_NE: corrected(bias_NE, load_NE, rate), buffers)


def scalars(sums: Sums) -> dict[str, jax.Array]:
    """Return the mean of each of several sums, and of the load MaxVio and each expert's part.

    >>> import jax.numpy as jnp
    >>> load = Mean(jnp.array([[3.0, 1.0]]), jnp.float32(4.0))
    >>> {name: float(value) for name, value in scalars({"expert_load": load}).items()}
    {'max_vio': 0.5, 'expert_load/0/0': 0.75, 'expert_load/0/1': 0.25}
    """
    values: dict[str, jax.Array] = {}
    for name, mean in sums.items():
        if name != LOAD:
            values[name] = mean.total / mean.weight
            continue
        load_NE = mean.total / divisor(mean.weight)
        values["max_vio"] = violation(load_NE).max()
        for layer, load_E in enumerate(load_NE):
            values |= {f"{name}/{layer}/{i}": load_E[i] for i in range(load_E.shape[0])}
    return values
