"""Run: held-out examples."""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.data.digits import count, take
from jaxdist.commands.eject.data.order import BATCH
from jaxdist.commands.eject.models.mlp import measure

EVAL_BATCHES = 50  #: limited # of the held-out examples, from the first on


def evaluate(params: Any, data: Any) -> dict[str, float]:
    """The mean of what the loss measures."""
    found, measured = [], jax.jit(measure)
    total = count(data)
    total = min(total, EVAL_BATCHES * BATCH)  #: limited
    for first in range(0, total, BATCH):
        # The last example fills up the last batch, and counts once.
        rows = np.minimum(np.arange(first, first + BATCH), total - 1)
        values = measured(params, jax.device_put(take(data, rows), P("data")))
        found.append({name: np.asarray(v)[: total - first] for name, v in values.items()})
    return {name: float(np.concatenate([one[name] for one in found]).mean()) for name in found[0]}
