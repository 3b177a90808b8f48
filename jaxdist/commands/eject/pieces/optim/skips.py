"""Optimizer: the rule that skips a step if its gradients would do harm."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.commands.eject.pieces.optim.adamw import init_moments, update

SPIKE_FACTOR = 4.0  #: spikes # multiple of the recent mean norm above which a step is skipped
SPIKE_WINDOW = 100  #: spikes # steps of this mean, before which no step is skipped


def init_state(params: Any) -> tuple[Any, Any]:
    """Return the moments, and the counts that `careful_update` keeps."""
    return init_moments(params), (jnp.int32(0),)  #: not spikes
    return init_moments(params), (jnp.int32(0), jnp.float32(0), jnp.int32(0))  #: spikes


def careful_update(params: Any, grads: Any, state: Any, step: jax.Array) -> tuple[Any, Any]:
    """Update as `update` does, or skip the step and change nothing but the counts."""
    moments, (skipped,) = state  #: not spikes
    moments, (skipped, mean, count) = state  #: spikes
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))  #: spikes
    limit = jnp.where((count >= SPIKE_WINDOW) & (mean > 0), SPIKE_FACTOR * mean, jnp.inf)  #: spikes
    finite = jnp.isfinite(norm)  #: spikes
    accepted = finite & (norm <= limit)  #: spikes
    # A skipped norm counts as the limit, so that the mean follows a lasting change.  #: spikes
    more = jnp.minimum(count + 1, SPIKE_WINDOW)  #: spikes
    after = mean + (jnp.minimum(norm, limit) - mean) / more  #: spikes
    mean, count = jnp.where(finite, after, mean), jnp.where(finite, more, count)  #: spikes
    finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]  #: not spikes
    accepted = jnp.stack(finite).all()  #: not spikes
    params, moments = jax.lax.cond(
        accepted,
        # Skipped steps do not count for the learning rate and the moments.
        lambda: update(params, grads, moments, step - skipped),
        lambda: (params, moments),
    )
    skipped += jnp.int32(~accepted)
    return params, (moments, (skipped,))  #: not spikes
    return params, (moments, (skipped, mean, count))  #: spikes
