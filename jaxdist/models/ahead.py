"""A scan over layers that fetches each layer's parameters while the layer before it computes.

`jax.lax.scan` could do this in the forward pass, but its gradient would keep every fetched layer
for the backward pass. This module therefore implements both passes. Only the layers' inputs are
kept, as with full remat, and the backward pass fetches each layer again while the layer after it
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.types import Grads, Params, PyTree, TreeT

BlockFn = Callable[..., jax.Array]
"""A function from (a layer's parameters, x, *operands) to a new x."""
Fetch = Callable[[PyTree], Params]
"""A linear function (a gather) from a layer's slice of the scanned tree to the layer's
parameters."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_ahead(
    block: BlockFn, fetch: Fetch, layers: PyTree, x: jax.Array, operands: tuple[PyTree, ...]
) -> jax.Array:
    """Apply `block(fetch(layer), x, *operands)` for each layer in turn, and return the last x.

    Each layer is fetched twice (forward and backward). Two fetched layers are in memory at a time,
    in addition to each layer's input, which is kept for the backward pass.

    Args:
      layers: a pytree of arrays with a leading dim that counts layers.
      x: the activations, whose shape and dtype every block keeps.
      operands: a tuple of the arguments of `block` after x, which are the same for all layers.
    """
    return _forward(block, fetch, layers, x, operands)[0]


def _forward(
    block: BlockFn, fetch: Fetch, layers: PyTree, x: jax.Array, operands: tuple[PyTree, ...]
) -> tuple[jax.Array, PyTree]:
    count = _count(layers)

    def body(
        carry: tuple[Params, jax.Array], at: jax.Array
    ) -> tuple[tuple[Params, jax.Array], jax.Array]:
        params, x = carry
        following = fetch(_layer(layers, at + 1))
        return (following, block(params, x, *operands)), x

    first = fetch(_layer(layers, 0))
    (last, x), inputs = lax.scan(body, (first, x), jnp.arange(count - 1))
    return block(last, x, *operands), (layers, inputs, x, operands)


def _backward(
    block: BlockFn, fetch: Fetch, kept: PyTree, cotangent: jax.Array
) -> tuple[Grads, jax.Array, tuple[Grads, ...]]:
    layers, inputs, last, operands = kept
    count = _count(layers)

    def pulled(at: jax.Array | int, params: Params, x: jax.Array, found: PyTree) -> PyTree:
        """Run the backward pass of layer `at`; return `found` with the new cotangents added."""
        filled, more, cotangent = found
        of_params, cotangent, *of_operands = _pull(block, (params, x, *operands), cotangent)
        (of_layer,) = _pull(fetch, (_layer(layers, at),), of_params)
        filled = jax.tree.map(partial(_put, at), filled, of_layer)
        return filled, jax.tree.map(_add, more, tuple(of_operands)), cotangent

    def body(carry: tuple[Params, PyTree], at: jax.Array) -> tuple[tuple[Params, PyTree], None]:
        params, found = carry
        before = fetch(_layer(layers, at - 1))
        return (before, pulled(at, params, _layer(inputs, at), found)), None

    found = (_zeros(layers), _zeros(operands), cotangent)
    params = fetch(_layer(layers, count - 1))
    # The last layer is outside of the loop, because the forward pass did not stack its input. The
    # first layer is outside of the loop too, since no layer is left to fetch while it computes.
    if count > 1:
        before = fetch(_layer(layers, count - 2))
        found = pulled(count - 1, params, last, found)
        (params, found), _ = lax.scan(body, (before, found), jnp.arange(count - 2, 0, -1))
        last = _layer(inputs, 0)
    of_layers, of_operands, of_x = pulled(0, params, last, found)
    return of_layers, of_x, of_operands


scan_ahead.defvjp(_forward, _backward)


def _count(layers: PyTree) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def _layer(stack: PyTree, at: jax.Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), stack)


def _pull(
    function: Callable[..., PyTree], given: tuple[PyTree, ...], cotangent: PyTree
) -> tuple[Grads, ...]:
    return jax.vjp(function, *given)[1](cotangent)


def _differentiable(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _zeros(tree: TreeT) -> TreeT:
    """Return cotangents of zero, which have jax's dtype float0 for integers and random keys."""
    return jax.tree.map(
        lambda leaf: (
            jnp.zeros_like(leaf)
            if _differentiable(leaf)
            else np.zeros(leaf.shape, jax.dtypes.float0)
        ),
        tree,
    )


def _put(at: jax.Array | int, stack: PyTree, new: jax.Array) -> jax.Array:
    return stack if _is_float0(stack) else lax.dynamic_update_index_in_dim(stack, new, at, 0)


def _add(total: jax.Array, more: jax.Array) -> jax.Array:
    return total if _is_float0(total) else total + more


def _is_float0(leaf: jax.Array) -> bool:
    return leaf.dtype == jax.dtypes.float0
