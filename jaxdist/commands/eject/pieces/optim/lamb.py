"""Optimizer: LAMB (arXiv 1904.00962), Adam scaled to the norm of each layer's weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.optim.rate import learning_rate

LEARNING_RATE = 1e-3  #: not scheduled
B1 = 0.9  # decay of the first moment
B2 = 0.999  # decay of the second moment
EPS = 1e-6
WEIGHT_DECAY = 0.01  #: decay
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
    # 1 - b^t, the sum of a moment's weights; computed as a difference it would lose digits.
    sum1, sum2 = (-jnp.expm1((step + 1.0) * math.log(b)) for b in (B1, B2))

    def moved(path: Any, p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        move = m / sum1 / (jnp.sqrt(v / sum2) + EPS)
        if path[-1].key in ("bias", "scale"):  # vectors are updated as by Adam, without decay
            return p - rate * move
        move += WEIGHT_DECAY * p  #: decay
        dims = range(1 if path[0].key == "blocks" else 0, p.ndim)  #: stacked # one norm a layer
        dims = range(p.ndim)  #: not stacked
        weight, size = (jnp.sqrt(jnp.sum(x * x, dims, keepdims=True)) for x in (p, move))
        return p - rate * jnp.where((weight > 0) & (size > 0), weight / size, 1.0) * move

    return jax.tree_util.tree_map_with_path(moved, params, mu, nu), (mu, nu)
