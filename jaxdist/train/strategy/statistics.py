"""A model's running statistics on servers: a second kind of push, averaged by examples.

Servers hold statistics as they hold parameters, in the same flat arrays. A worker pushes by how
much its batch moved them, with the opposite sign, and the server's update is a step of size 1
without a learning rate. A merge weights pushes by their examples, so that after a step of all
workers the statistics are those of the workers, averaged by examples.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist.types import Buffers, OptState, Params, PyTree, Updates

# No attribute of a module has a hyphen, so no parameter has this name.
_KEY = "running-statistics"


def held(params: Params, buffers: Buffers) -> PyTree:
    """Return the tree of all that servers hold: parameters, and statistics if there are any."""
    return {**params, _KEY: buffers} if jax.tree.leaves(buffers) else params


def divided(tree: PyTree, buffers: Buffers) -> tuple[Params, Buffers]:
    """Divide a tree of `held` into parameters and statistics.

    Args:
      buffers: the statistics to return where the tree has none.
    """
    if _KEY not in tree:
        return tree, buffers
    return {name: one for name, one in tree.items() if name != _KEY}, tree[_KEY]


def change(grads: Updates, before: Buffers, after: Buffers) -> PyTree:
    """Return what a worker pushes: gradients, and how far statistics moved, with the other sign."""
    return held(grads, jax.tree.map(jnp.subtract, before, after))


def is_statistic(name: str) -> bool:
    """Return whether a name of a leaf of `held` is that of a statistic."""
    return name.startswith(f"{_KEY}/")


def averaging(
    inner: optax.GradientTransformationExtraArgs, keys: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation of a flat dict that moves the arrays of `keys` by what is pushed.

    Args:
      inner: the optimizer of the other arrays.
      keys: keys of the statistics.
    """
    if not keys:
        return inner

    def others(tree: PyTree) -> PyTree:
        return {key: leaf for key, leaf in tree.items() if key not in keys}

    def init(params: Params) -> OptState:
        # A server may hold statistics alone, and not every optimizer takes an empty tree.
        return inner.init(others(params)) if others(params) else ()

    def update(
        updates: Any, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        own: Any = others(updates)
        if own:
            own, state = inner.update(own, state, others(params), **extra)
        return {key: -one if key in keys else own[key] for key, one in updates.items()}, state

    return optax.GradientTransformationExtraArgs(init, update)
