"""Step: each device computes on its own rows; messages around a ring sum the gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.mlp import measure
from jaxdist.commands.eject.pieces.optim.adamw import update
from jaxdist.commands.eject.pieces.order import BATCH

MESH = {"data": 8}  # devices along each axis
ROWS = P("data")  # sharding of a batch
PARAMS = P()  # sharding of the parameters
MOMENTS = (PARAMS, PARAMS)  # sharding of the optimizer's state
DEVICES = 8  # number of devices on the ring
WAYS = ((1, 4), (-1, 3))  # direction of each chain of messages, and its length
BUCKETS = ((5, 4), (3, 2, 1, 0))  # gradients that are sent together, the last layer's first


def ring_sum(x: jax.Array) -> jax.Array:
    """Return the sum over all devices of x [n]; each sends 2 (DEVICES - 1) / DEVICES n numbers."""
    blocks = jnp.pad(x, (0, -x.size % DEVICES)).reshape(DEVICES, -1)
    me = jax.lax.axis_index("data")

    def send(x: jax.Array, way: int) -> jax.Array:
        pairs = [(i, (i + way) % DEVICES) for i in range(DEVICES)]
        return jax.lax.ppermute(x, "data", pairs)

    # Reduce-scatter: the sum of block i accumulates on the way to device i.
    total = blocks[me]
    for way, hops in WAYS:
        growing = blocks[(me + way * hops) % DEVICES]
        for hop in range(hops - 1, 0, -1):
            growing = send(growing, way) + blocks[(me + way * hop) % DEVICES]
        total = send(growing, way) + total
    # All-gather: the sums travel around the ring.
    blocks = blocks.at[me].set(total)
    for way, hops in WAYS:
        passing = total
        for hop in range(1, hops + 1):
            passing = send(passing, way)
            blocks = blocks.at[(me - way * hop) % DEVICES].set(passing)
    return blocks.reshape(-1)[: x.size]


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
    return (*update(params, grads, moments, step), loss)
