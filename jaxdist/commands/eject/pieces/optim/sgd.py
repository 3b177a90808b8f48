"""Optimizer: gradient descent with momentum."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.optim.rate import learning_rate

LEARNING_RATE = 1e-3  #: not scheduled
MOMENTUM = 0.9  # decay of the velocity
WEIGHT_DECAY = 0.1  #: decay
CLIP_NORM = 1.0  #: clip # gradients of a larger global norm are scaled down to it


def init_moments(params: Any) -> Any:
    """Return zeros as the velocity of each parameter."""
    return jax.tree.map(jnp.zeros_like, params)


def update(params: Any, grads: Any, moments: Any, step: jax.Array) -> tuple[Any, Any]:
    """Return the parameters and velocities after a step; steps count from 0."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))  #: clip
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP_NORM / (norm + 1e-12)), grads)  #: clip
    rate = learning_rate(step)  #: scheduled
    rate = LEARNING_RATE  #: not scheduled

    def decayed(path: Any, g: jax.Array, p: jax.Array) -> jax.Array:  #: decay
        return g if path[-1].key in ("bias", "scale") else g + WEIGHT_DECAY * p

    grads = jax.tree_util.tree_map_with_path(decayed, grads, params)  #: decay
    moments = jax.tree.map(lambda v, g: MOMENTUM * v + g, moments, grads)
    moves = jax.tree.map(lambda v, g: MOMENTUM * v + g, moments, grads)  #: nesterov
    moves = moments  #: not nesterov
    return jax.tree.map(lambda p, v: p - rate * v, params, moves), moments
