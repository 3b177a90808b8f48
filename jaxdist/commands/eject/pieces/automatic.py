"""Step: XLA places the communication, from where arrays lie on the mesh."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.pieces.adamw import update
from jaxdist.commands.eject.pieces.mlp import measure

MESH = {"data": 8}  # devices along each axis
ROWS = P("data")  # where a batch lies
PARAMS = P()  # where parameters lie
SHARDS = P()  #: apart # where each device's share of the moments lies, which it updates
MOMENTS = (PARAMS, PARAMS)  # where the optimizer's state lies


def mean_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean over the examples of all devices."""
    return measure(params, batch)["loss"].mean()


def train_step(params: Any, moments: Any, batch: Any, step: jax.Array) -> tuple[Any, ...]:
    """Parameters and moments after a step, and the loss before it."""
    constrain = jax.lax.with_sharding_constraint  #: zero
    # Each layer's parameters are gathered where they are used, in both passes.  #: zero3
    loss, grads = jax.value_and_grad(mean_loss)(params, batch)
    # Over `data` the batch is split and gradients are not: XLA adds an all-reduce.  #: whole
    grads = constrain(grads, PARAMS)  #: zero1
    # A device gets its share of the sums alone: a reduce-scatter.  #: zero2
    grads, params = constrain((grads, params), (SHARDS, SHARDS))  #: apart
    grads = constrain(grads, PARAMS)  #: zero3
    params, moments = update(params, grads, moments, step)
    # The caller wants parameters whole: the new shares are gathered.  #: apart
    return params, moments, loss
