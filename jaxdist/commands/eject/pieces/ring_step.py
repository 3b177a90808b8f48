"""Step: each device computes on its own rows; messages around a ring sum the gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.mlp import measure
from jaxdist.commands.eject.pieces.optim.adamw import update
from jaxdist.commands.eject.pieces.optim.skips import careful_update
from jaxdist.commands.eject.pieces.order import BATCH
from jaxdist.commands.eject.pieces.ring import ring_sum

MESH = {"data": 8}  # devices along each axis
ROWS = P("data")  # sharding of a batch
PARAMS = P()  # sharding of the parameters
MOMENTS = (PARAMS, PARAMS)  # sharding of the optimizer's state
BUCKETS = ((5, 4), (3, 2, 1, 0))  # gradients that are sent together, the last layer's first


# The ring's result is equal on all devices, which JAX cannot prove: hence check_vma=False.
@partial(jax.shard_map, in_specs=(PARAMS, ROWS), out_specs=(P(), PARAMS), check_vma=False)
def mean_gradients(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Return the loss and gradients over all rows; each device runs this on its own rows."""
    total, grads = jax.value_and_grad(lambda p: measure(p, batch)["loss"].sum())(params)
    leaves, structure = jax.tree.flatten(grads)
    for bucket in BUCKETS:
        flat = ring_sum(jnp.concatenate([leaves[i].reshape(-1) for i in bucket])) / BATCH
        ends = np.cumsum([leaves[i].size for i in bucket])
        for i, part in zip(bucket, jnp.split(flat, ends[:-1]), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.lax.psum(total, "data") / BATCH, structure.unflatten(leaves)


def train_step(params: Any, moments: Any, batch: Any, step: jax.Array) -> tuple[Any, ...]:
    """Return the parameters and moments after a step, and the loss before it."""
    loss, grads = mean_gradients(params, batch)
    return (*update(params, grads, moments, step), loss)  #: not skips
    return (*careful_update(params, grads, moments, step), loss)  #: skips
