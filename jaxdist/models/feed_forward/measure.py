"""The auxiliary losses and the metrics of routers, and the biases that balance the load.

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
"""The name of the experts' loads among the sums of a loss; the loads are a `Mean` `[N, E]`."""
Settle = Callable[[Buffers, Sums], Buffers]
"""A function from (buffers after a step's passes, sums of its batch) to the next step's buffers."""


class Auxiliary(NamedTuple):
    """The auxiliary losses of routers, and the metrics of routers.

    Attributes:
      penalty: the sum of the auxiliary losses, each times its coefficient. Like the total of a
        loss, the penalty is summed over tokens and not divided by the weight of the tokens.
      sums: the metrics, each as a total with its weight: the names in `SUMS`, and the load.
    """

    penalty: jax.Array
    sums: Sums


def auxiliary(statistics: Statistics, weight_BL: jax.Array, experts: ExpertsConfig) -> Auxiliary:
    """Return the auxiliary losses and the metrics of a batch.

    The penalty is summed over layers, while the metrics of `SUMS` are averaged over layers.
    """
    weight, layers = weight_BL.sum(), len(statistics.load)
    totals = dict(zip(SUMS, statistics.sums.sum(0), strict=True))
    penalty = experts.balance * totals["balance_loss"] + experts.z_loss * totals["z_loss"]
    # Only the penalty has a gradient. The load and the metrics are reported.
    load_NE = jax.lax.stop_gradient(statistics.load.sum(1))
    sums = {
        name: Mean(jax.lax.stop_gradient(total) / layers, weight) for name, total in totals.items()
    }
    return Auxiliary(penalty, {**sums, LOAD: Mean(load_NE, weight * experts.top_k)})


def moved_biases(buffers: Buffers, sums: Sums, *, rate: float) -> Buffers:
    """Return the biases of routers after a step, given the load of the step's whole batch.

    Each bias moves by `rate` towards an even load (`corrected`).

    The biases are the only buffers of the model.
    """
    load_NE = sums[LOAD].total
    return jax.tree.map(lambda bias_NE: corrected(bias_NE, load_NE, rate), buffers)


def scalars(sums: Sums) -> dict[str, jax.Array]:
    """Return scalars to report: the mean of each sum, and several values for the load.

    These values are each expert's fraction of the load, and the largest MaxVio of a layer (see
    `violation`).

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
