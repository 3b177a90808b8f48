"""Step: each device computes on its own rows; messages around a ring sum the gradients."""

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.mlp import measure
from jaxdist.commands.eject.pieces.optim.adamw import update
from jaxdist.commands.eject.pieces.optim.skips import careful_update
from jaxdist.commands.eject.pieces.order import BATCH
from jaxdist.commands.eject.pieces.ring import ring_sum
from jaxdist.commands.eject.pieces.shares import gather, scatter

MESH = {"data": 8}  # devices along each axis
ROWS = P("data")  # sharding of a batch
PARAMS = P()  # sharding of the parameters
SHARDS = {"embedding": P("data")}  #: apart # sharding of gradients and moments: shares
GRADS = PARAMS  # sharding of the gradients
MOMENTS = (PARAMS, PARAMS)  # sharding of the optimizer's state
SPLIT = {0: 0, 2: 0}  # the dim along which devices share a parameter, by the parameter's number


# The ring's result is equal on all devices, which JAX cannot prove: hence check_vma=False.
@partial(jax.shard_map, in_specs=(PARAMS, ROWS), out_specs=(P(), GRADS), check_vma=False)
def mean_gradients(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Return the loss and gradients over all rows; each device runs this on its own rows."""
    total, grads = jax.value_and_grad(lambda p: measure(p, batch)["loss"].sum())(params)
    leaves, structure = jax.tree.flatten(grads)
    for i, leaf in enumerate(leaves):
        if i not in SPLIT:  # a small tensor, which every device keeps whole
            leaves[i] = ring_sum(leaf.reshape(-1)).reshape(leaf.shape)
    for i, dim in SPLIT.items():  #: apart
        leaves[i] = scatter(leaves[i], dim)
    return jax.lax.psum(total, "data") / BATCH, structure.unflatten([g / BATCH for g in leaves])


@partial(jax.shard_map, in_specs=(SHARDS,), out_specs=PARAMS, check_vma=False)  #: apart
def gathered(params: Any) -> Any:  #: apart
    """Return the whole parameters from the shares that the devices have updated."""
    leaves, structure = jax.tree.flatten(params)
    for i, dim in SPLIT.items():
        leaves[i] = gather(leaves[i], dim)
    return structure.unflatten(leaves)


def train_step(params: Any, moments: Any, batch: Any, step: jax.Array) -> tuple[Any, ...]:
    """Return the parameters and moments after a step, and the loss before it."""
    loss, grads = mean_gradients(params, batch)
    params = jax.lax.with_sharding_constraint(params, SHARDS)  #: apart # updated only in shares
    params, moments = update(params, grads, moments, step)  #: not skips
    params, moments = careful_update(params, grads, moments, step)  #: skips
    return gathered(params), moments, loss  #: apart
    return params, moments, loss  #: not apart
