"""Run: the training loop, in one process that uses all its devices."""

from typing import Any

import jax
import numpy as np

from jaxdist.commands.eject.pieces.automatic import PARAMS, ROWS
from jaxdist.commands.eject.pieces.mlp import measure
from jaxdist.commands.eject.pieces.order import BATCH

EVAL_BATCHES = 50  #: limited # number of held-out batches, from the first


def evaluate(params: Any, data: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the means of the loss's measurements over the held-out examples."""
    found, measured, total = [], jax.jit(measure), len(next(iter(data.values())))  #: not ring3
    specs: Any = {"in_specs": (PARAMS, ROWS), "out_specs": ROWS, "check_vma": False}  #: ring3
    measured = jax.jit(jax.shard_map(measure, **specs))  #: ring3 # the model gathers its parameters
    found, total = [], len(next(iter(data.values())))  #: ring3
    total = min(total, EVAL_BATCHES * BATCH)  #: limited
    for first in range(0, total, BATCH):
        # The last batch is padded with the last example, which still counts once.
        rows = np.minimum(np.arange(first, first + BATCH), total - 1)
        batch = jax.device_put({name: values[rows] for name, values in data.items()}, ROWS)
        values = jax.device_get(measured(params, batch))
        found.append({name: value[: total - first] for name, value in values.items()})
    return {name: float(np.concatenate([one[name] for one in found]).mean()) for name in found[0]}
