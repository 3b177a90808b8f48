"""Pytrees of arrays `[slots, ...]`, and sums of gradients, inside a jitted function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def buffer(shapes: Any, slots: int) -> Any:
    """An empty buffer."""
    # One slot at least: branches that are never taken are compiled, too.
    return jax.tree.map(lambda s: jnp.zeros((max(slots, 1), *s.shape), s.dtype), shapes)


def read(held: Any, slot: jax.Array) -> Any:
    """What lies in a slot; anything if `slot` is negative."""
    at = jnp.maximum(slot, 0)

    def leaf(held: jax.Array) -> jax.Array:
        # The only slot is read where it lies; one of several is copied out of the buffer.
        return held[0] if len(held) == 1 else lax.dynamic_index_in_dim(held, at, keepdims=False)

    return jax.tree.map(leaf, held)


def put(held: Any, slot: jax.Array, value: Any) -> Any:
    """The buffer with a value in a slot; as it was if `slot` is negative."""
    at = jnp.maximum(slot, 0)

    def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        # A choice between two values of one slot, not between two buffers: no copy is made.
        kept = lax.dynamic_index_in_dim(old, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(old, jnp.where(slot >= 0, new, kept), at, 0)

    return jax.tree.map(leaf, held, value)


def put_one(held: Any, slot: jax.Array, value: Any) -> Any:
    """The buffer with a value in a slot, which is none of the negative ones."""
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_index_in_dim(old, new, slot, 0), held, value
    )


def zeros(shapes: Any) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def no_gradients(params: Any) -> Any:
    """Zeros to sum gradients in: float32 or wider."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def add(total: Any, more: Any) -> Any:
    """Their sum, in the dtypes of the total."""
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)


def constrain(tree: Any, specs: Any, lead: int) -> Any:
    """The tree, each leaf split over automatic axes as its spec says, after `lead` other dims."""
    mesh = jax.sharding.get_abstract_mesh()

    def leaf(spec: PartitionSpec, x: Any) -> Any:
        whole = NamedSharding(mesh, PartitionSpec(*(None,) * lead, *spec))
        return jax.tree.map(lambda own: lax.with_sharding_constraint(own, whole), x)

    return jax.tree.map(leaf, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))
