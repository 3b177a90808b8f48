"""The buffers of a pipeline's executor, and sums of gradients, as traced values.

A buffer is a pytree of arrays `[slots, ...]`. A slot of a buffer holds one value, a pytree of
arrays `[...]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.types import Grads, Params, PyTree, Specs, TreeT


def buffer(shapes: PyTree, slots: int) -> PyTree:
    """Create a buffer of zeros with `slots` slots, or with one slot if `slots` is 0.

    Args:
      shapes: the shapes and dtypes of a value, a pytree.
      slots: the number of values that the buffer has to hold at a time.
    """
    # A buffer without slots would not compile, even in branches that are never taken.
    return jax.tree.map(lambda s: jnp.zeros((max(slots, 1), *s.shape), s.dtype), shapes)


def read_slot(held: PyTree, slot: jax.Array) -> PyTree:
    """Return the value in a slot of a buffer; if `slot` is `NONE` (-1), the value is arbitrary."""
    at = jnp.maximum(slot, 0)

    def leaf(held: jax.Array) -> jax.Array:
        # A static index reads a single slot in place. A dynamic index would copy the slot.
        return held[0] if len(held) == 1 else lax.dynamic_index_in_dim(held, at, keepdims=False)

    return jax.tree.map(leaf, held)


def put(held: TreeT, slot: jax.Array, value: PyTree) -> TreeT:
    """Return a buffer with a value written to a slot, or unchanged if `slot` is `NONE` (-1)."""
    at = jnp.maximum(slot, 0)

    def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        # One of two values is always written to slot `at`, because a choice between two buffers
        # would copy a buffer. For NONE, slot 0 is overwritten with its own content.
        kept = lax.dynamic_index_in_dim(old, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(old, jnp.where(slot >= 0, new, kept), at, 0)

    return jax.tree.map(leaf, held, value)


def put_one(held: TreeT, slot: jax.Array, value: PyTree) -> TreeT:
    """Return a buffer with a value written to a slot, which must not be `NONE`."""
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_index_in_dim(old, new, slot, 0), held, value
    )


def zeros(shapes: PyTree) -> PyTree:
    """Create a pytree of zeros with the shapes and dtypes of `shapes`."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def no_gradients(params: Params) -> Grads:
    """Create zeros to which gradients are added: like the parameters, but in float32 or wider."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def add(total: TreeT, more: PyTree) -> TreeT:
    """Add two trees leaf by leaf, in the dtypes of `total`."""
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)


def constrain(tree: TreeT, specs: Specs, lead: int) -> TreeT:
    """Constrain each leaf of a tree to a partition spec over auto axes.

    Args:
      tree: the tree to constrain.
      specs: a tree of specs, in which a spec may apply to all leaves of a subtree of `tree`.
      lead: the number of first dims that a leaf has in addition to the dims of its spec. These dims
        are not split.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def leaf(spec: PartitionSpec, x: PyTree) -> PyTree:
        whole = NamedSharding(mesh, PartitionSpec(*(None,) * lead, *spec))
        return jax.tree.map(lambda own: lax.with_sharding_constraint(own, whole), x)

    return jax.tree.map(leaf, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))
