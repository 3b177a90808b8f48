"""The states of compared runs: placed on devices, changed a little, and loaded from checkpoints."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.run.checkpoints import fresh_exchange, restore
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree

FULL, HALF = 2**-20, 2**-8
"""The relative sizes of nudges, which imitate the effects of rounding in float32 and bfloat16."""
NUDGES = range(3)
"""The seeds of nudges. A single nudge is not enough, since by chance it may change a gradient by
only a fiftieth of the change that other nudges cause."""


def place_state(program: Program, initial: TrainState) -> TrainState:
    """Return a copy of a host state on a program's devices, in the form that the plan stores.

    The exchange state of compression and strategies is not copied, but initialized.
    """
    shapes = replace(program.state_shapes, exchange=())
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    # `np.array` copies: the step donates its state, and may overwrite memory shared with the host.
    stored = program.home.stored(jax.tree.map(np.array, replace(initial, exchange=())))
    state = jax.device_put(stored, shardings)
    return replace(state, exchange=fresh_exchange(program))


def moving(state: TrainState) -> dict[str, np.ndarray]:
    """Return the parameters and the floating-point buffers of a state, by name."""
    buffers = {
        f"buffer {name}": leaf
        for name, leaf in leaves_by_name(state.buffers).items()
        if np.issubdtype(leaf.dtype, np.floating)
    }
    return {**leaves_by_name(state.params), **buffers}


def updates_of(before: TrainState, after: TrainState) -> dict[str, np.ndarray]:
    """Return the changes of parameters and buffers between two states, by name."""
    first, last = moving(before), moving(after)
    return {name: last[name] - first[name] for name in last}


def leaves_by_name(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree as arrays in float64, by name."""
    # The arrays are in float64, so that the comparison itself adds no rounding.
    return {name: np.asarray(leaf, np.float64) for name, leaf in flatten_with_names(tree)}


def reloaded(saved: Program, state: TrainState, target: Program) -> TrainState:
    """Save a program's state as a checkpoint, and return the state that another program loads.

    Args:
      saved: the program that saves the state.
      state: the state to save.
      target: the program that loads the checkpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoints"
        with CheckpointStore(path, keep=1, keep_best=False, on_event=lambda _: None) as store:
            store.save(1, saved.home.to_files(state), metadata={}, shapes=saved.own_shapes)
            store.wait()
            return restore(store, target, say=lambda _: None).state


def replicas_apart(state: PyTree) -> tuple[float, str]:
    """Return the largest difference between replicas of a tensor, and the tensor's name.

    The difference is relative to the tensor's largest element. If all replicas are equal, the
    result is 0.0 and an empty name.
    """
    worst = (0.0, "")
    for name, leaf in flatten_with_names(state):
        first: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            own = np.asarray(shard.data, np.float64)
            other = first.setdefault(str(shard.index), own)
            if not np.array_equal(own, other, equal_nan=True):
                # NumPy would warn of zeros, infinities and NaNs, which are results here.
                with np.errstate(all="ignore"):
                    apart = np.abs(own - other).max() / np.abs(other).max()
                worst = max(worst, (math.inf if np.isnan(apart) else float(apart), name))
    return worst


def nudged(state: TrainState, size: float = FULL, seed: int = 0) -> TrainState:
    """Return a host state with each parameter randomly changed by at most the fraction `size`.

    Args:
      state: the state to change.
      size: the largest relative change of an element.
      seed: the seed of the random changes.
    """
    return replace(state, params=nudged_tree(state.params, size, seed))


def nudged_tree(tree: PyTree, size: float, seed: int) -> PyTree:
    """Return a host tree with each float randomly changed by at most the fraction `size`.

    Args:
      tree: the tree to change.
      size: the largest relative change of an element.
      seed: the seed of the random changes.
    """
    random = np.random.default_rng(seed)

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = random.uniform(-size, size, np.shape(leaf))
        return np.asarray(leaf * (1 + noise), leaf.dtype)

    return jax.tree.map(nudge, tree)
