"""An optimizer that keeps an average of the parameters, and functions that return the average."""

from typing import NamedTuple

import jax
import optax


class Averaged(NamedTuple):
    inner: optax.OptState
    mean: optax.Params


def averaged(rate, decay=0.5):
    """Return SGD that also keeps an exponential average of the updated parameters."""
    inner = optax.sgd(rate)

    def init(params):
        return Averaged(inner.init(params), params)

    def update(updates, state, params=None):
        moves, own = inner.update(updates, state.inner, params)
        new = optax.apply_updates(params, moves)
        mean = jax.tree.map(lambda old, x: decay * old + (1 - decay) * x, state.mean, new)
        return moves, Averaged(own, mean)

    return optax.GradientTransformation(init, update)


def mean(state, params):
    return state.mean


def first(state, params):
    return jax.tree.leaves(state.mean)[0]
