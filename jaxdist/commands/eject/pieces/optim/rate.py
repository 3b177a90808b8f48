"""Optimizer: the learning rate of each step."""

import jax
import jax.numpy as jnp

LEARNING_RATE = 1e-3  # peak learning rate
STEPS = 100
WARMUP_STEPS = 10  #: warm
END_FRACTION = 0.1  #: decays # fraction of the peak at the last step
POWER = 1.0  #: poly


def learning_rate(step: jax.Array) -> jax.Array:
    """Return the learning rate of a step; steps count from 0."""
    done = jnp.clip((step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS), 0, 1)  #: ramped
    done = jnp.clip(step / STEPS, 0, 1)  #: unramped
    left = (1 + jnp.cos(jnp.pi * done)) / 2  #: cosine
    left = (1 - done) ** POWER  #: poly
    after = LEARNING_RATE * (END_FRACTION + (1 - END_FRACTION) * left)  #: ramped
    after = LEARNING_RATE  #: not decays
    return jnp.where(step < WARMUP_STEPS, LEARNING_RATE * (step + 1) / WARMUP_STEPS, after)  #: warm
    return LEARNING_RATE * (END_FRACTION + (1 - END_FRACTION) * left)  #: not warm
