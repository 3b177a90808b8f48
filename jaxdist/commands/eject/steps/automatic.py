"""Step: XLA places the communication, from where arrays lie on the mesh."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.commands.eject.models.mlp import measure
from jaxdist.commands.eject.optimizers.adamw import update

MESH_SHAPE = (8,)  # devices along each axis
MESH_AXES = ("data",)
PARAMS = P()  # where parameters lie
SHARDS = P()  #: zero # where each device keeps its share of the moments
MOMENTS = (P(), P())  # where the optimizer's state lies


def mean_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean over the examples of all devices."""
    return measure(params, batch)["loss"].mean()


def train_step(
    params: Any, moments: Any, batch: dict[str, jax.Array], step: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """Parameters and moments after a step, and the loss before it."""
    # The batch is split over `data` and parameters are not: XLA sums gradients by an all-reduce.
    loss, grads = jax.value_and_grad(mean_loss)(params, batch)
    params, moments = update(params, grads, moments, step)
    return params, moments, loss
