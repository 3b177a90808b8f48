"""Optimizer: Adam with decoupled weight decay (arXiv 1711.05101)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.optim.rate import learning_rate

LEARNING_RATE = 1e-3  #: not scheduled
B1 = 0.9  # decay of the first moment
B2 = 0.999  # decay of the second moment
EPS = 1e-8
WEIGHT_DECAY = 0.1  #: decay
CLIP_NORM = 1.0  #: clip # gradients of a larger global norm are scaled down to it


def init_moments(params: Any) -> tuple[Any, Any]:
    """Return zeros as the first and second moments of each parameter."""
    return jax.tree.map(jnp.zeros_like, (params, params))


def update(params: Any, grads: Any, moments: Any, step: jax.Array) -> tuple[Any, Any]:
    """Return the parameters and moments after a step; steps count from 0."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))  #: clip
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP_NORM / (norm + 1e-12)), grads)  #: clip
    rate = learning_rate(step)  #: scheduled
    rate = LEARNING_RATE  #: not scheduled
    mu = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, moments[0], grads)
    nu = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, moments[1], grads)

    def moved(path: Any, p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:  #: decay
        decay = 0.0 if path[-1].key in ("bias", "scale") else WEIGHT_DECAY
        # Moments start at zero, so they are divided by the sum of their weights so far.
        m, v = m / (1 - B1 ** (step + 1)), v / (1 - B2 ** (step + 1))
        return p - rate * (m / (jnp.sqrt(v) + EPS) + decay * p)

    def stepped(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:  #: not decay
        # Moments start at zero, so they are divided by the sum of their weights so far.
        m, v = m / (1 - B1 ** (step + 1)), v / (1 - B2 ** (step + 1))
        return p - rate * m / (jnp.sqrt(v) + EPS)

    return jax.tree_util.tree_map_with_path(moved, params, mu, nu), (mu, nu)  #: decay
    return jax.tree.map(stepped, params, mu, nu), (mu, nu)  #: not decay
