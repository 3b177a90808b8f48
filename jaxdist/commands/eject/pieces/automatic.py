"""Step: XLA inserts the communication that the arrays' shardings require."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.mlp import measure
from jaxdist.commands.eject.pieces.optim.adamw import update
from jaxdist.commands.eject.pieces.optim.skips import careful_update

MESH = {"data": 8}  # devices along each axis
ROWS = P("data")  # sharding of a batch
PARAMS = P()  # sharding of the parameters
SHARDS = P()  #: apart # sharding of moments and updates: one share per device
MOMENTS = (PARAMS, PARAMS)  # sharding of the optimizer's state


def mean_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean loss over the examples of all devices."""
    return measure(params, batch)["loss"].mean()


def train_step(params: Any, moments: Any, batch: Any, step: jax.Array) -> tuple[Any, ...]:
    """Return the parameters and moments after a step, and the loss before it."""
    constrain = jax.lax.with_sharding_constraint  #: zero
    # XLA gathers each layer's parameters where they are used, in both passes.  #: zero3
    loss, grads = jax.value_and_grad(mean_loss)(params, batch)
    # The batch is sharded over `data` and gradients are not, so XLA adds an all-reduce.  #: whole
    grads = constrain(grads, PARAMS)  #: zero1
    # Each device receives only its share of the summed gradients: a reduce-scatter.  #: zero2
    grads, params = constrain((grads, params), (SHARDS, SHARDS))  #: apart
    grads = constrain(grads, PARAMS)  #: zero3
    # The output sharding gathers the updated shares of the parameters.  #: apart
    return (*update(params, grads, moments, step), loss)  #: not skips
    return (*careful_update(params, grads, moments, step), loss)  #: skips
