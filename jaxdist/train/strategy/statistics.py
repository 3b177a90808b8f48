"""A model's running statistics on servers, where the pushes of workers average them.

Servers hold statistics in the same flat arrays as parameters. A worker pushes the negated change of
the statistics in its batch, and the server subtracts the push, without a learning rate. A merge
weights pushes by their number of examples. After a step of all workers, the statistics are
therefore the mean of the workers' statistics, weighted by examples.
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


def with_statistics(params: Params, buffers: Buffers) -> PyTree:
    """Return the tree of values that servers hold: the parameters, and any statistics."""
    return {**params, _KEY: buffers} if jax.tree.leaves(buffers) else params


def divided(tree: PyTree, buffers: Buffers) -> tuple[Params, Buffers]:
    """Divide a result of `with_statistics` into parameters and statistics.

    Args:
      buffers: the statistics to return if the tree has none.
    """
    if _KEY not in tree:
        return tree, buffers
    return {name: one for name, one in tree.items() if name != _KEY}, tree[_KEY]


def pushed_values(grads: Updates, before: Buffers, after: Buffers) -> PyTree:
    """Return the values that a worker pushes: gradients, and the negated change of statistics.

    Args:
      before: the statistics before the batch.
      after: the statistics after the batch.
    """
    return with_statistics(grads, jax.tree.map(jnp.subtract, before, after))


def is_statistic(name: str) -> bool:
    """Return whether a leaf of a result of `with_statistics` is a statistic, given its name."""
    return name.startswith(f"{_KEY}/")


def averaging(
    inner: optax.GradientTransformationExtraArgs, keys: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of a flat dict; it subtracts the pushed values from the statistics.

    Args:
      inner: the optimizer of the other arrays.
      keys: the keys of the statistics.
    """
    if not keys:
        return inner

    def others(tree: PyTree) -> PyTree:
        return {key: leaf for key, leaf in tree.items() if key not in keys}

    def init(params: Params) -> OptState:
        # If a server holds only statistics, `others` returns an empty tree, which not every
        # optimizer accepts.
        return inner.init(others(params)) if others(params) else ()

    def update(
        updates: Any, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        own: Any = others(updates)
        if own:
            own, state = inner.update(own, state, others(params), **extra)
        return {key: -one if key in keys else own[key] for key, one in updates.items()}, state

    return optax.GradientTransformationExtraArgs(init, update)
