"""Differentiable collectives, whose backward passes run by the same algorithm.

Each function takes and returns flat arrays, like the method of `Algorithm` with the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import Axis, CollectiveError, rank, varying
from jaxdist.collectives.contract import Algorithm

Function = Callable[[jax.Array], jax.Array]


def all_reduce(algorithm: Algorithm, axis: Axis, x: jax.Array) -> jax.Array:
    """Sum the arrays of all devices; the backward pass is an all-reduce too."""
    forward = partial(algorithm.all_reduce, axis=axis, combine=lax.add)
    return _linear("all_reduce", algorithm, axis, forward, partial(all_reduce, algorithm, axis))(x)


def reduce_scatter(algorithm: Algorithm, axis: Axis, blocks: jax.Array) -> jax.Array:
    """Sum the arrays of all devices, and return this device's block.

    The backward pass is an all-gather.
    """
    forward = partial(algorithm.reduce_scatter, axis=axis, combine=lax.add)
    return _linear(
        "reduce_scatter", algorithm, axis, forward, partial(all_gather, algorithm, axis)
    )(blocks)


def all_gather(algorithm: Algorithm, axis: Axis, block: jax.Array) -> jax.Array:
    """Gather the blocks of all devices; the backward pass is a reduce-scatter."""
    forward = partial(algorithm.all_gather, axis=axis)
    return _linear(
        "all_gather", algorithm, axis, forward, partial(reduce_scatter, algorithm, axis)
    )(block)


def broadcast(algorithm: Algorithm, axis: Axis, root: int, x: jax.Array) -> jax.Array:
    """Copy the root's array to all devices; the backward pass is a reduce."""
    forward = partial(algorithm.broadcast, axis=axis, root=root)
    return _linear("broadcast", algorithm, axis, forward, partial(reduce, algorithm, axis, root))(x)


def reduce(algorithm: Algorithm, axis: Axis, root: int, x: jax.Array) -> jax.Array:
    """Sum the arrays of all devices on `root`, and return zeros on the other devices.

    The backward pass is a broadcast.
    """

    def forward(x: jax.Array) -> jax.Array:
        return on_root(algorithm.reduce(x, axis, root, lax.add), axis, root)

    return _linear("reduce", algorithm, axis, forward, partial(broadcast, algorithm, axis, root))(x)


def all_to_all(algorithm: Algorithm, axis: Axis, blocks: jax.Array) -> jax.Array:
    """Exchange row i of device j with row j of device i; the backward pass is an all-to-all too."""
    forward = partial(algorithm.all_to_all, axis=axis)
    return _linear("all_to_all", algorithm, axis, forward, partial(all_to_all, algorithm, axis))(
        blocks
    )


def on_root(x: jax.Array, axis: Axis, root: int) -> jax.Array:
    """Return `x` on the device `root`, and zeros on the other devices."""
    return jnp.where(rank(axis) == root, x, jnp.zeros_like(x))


def extremum(operation: str, forward: Function) -> Function:
    """Return a function that calls `forward`, and whose differentiation raises an error.

    Args:
      operation: the name of the collective, for the error message.
      forward: the function that computes the max or the min.

    Raises:
      CollectiveError: the returned function is differentiated. The call of `extremum` itself raises
        no error.
    """

    def refuse(x: jax.Array) -> tuple[jax.Array, None]:
        raise CollectiveError(
            f"{operation} of {x.dtype}{list(x.shape)} has no derivative: wrap its argument in "
            "jax.lax.stop_gradient, or use op='sum' or 'mean', which have derivatives"
        )

    def never(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        raise AssertionError("`refuse` raises in the forward pass, before this function can run")

    function = jax.custom_vjp(forward)
    function.defvjp(refuse, never)
    return function


def _linear(
    operation: str, algorithm: Algorithm, axis: Axis, forward: Function, transpose: Function
) -> Function:
    if algorithm.native:
        return forward

    def typed(x: jax.Array) -> jax.Array:
        # `forward` may use a native algorithm, whose result jax types as replicated. The cotangent
        # has the type of the result, and must be varying so that it can be summed.
        return varying(forward(x), axis)

    typed.__name__ = f"jaxdist_{operation}"  # `jaxdist.proofs` finds the operation by this name
    function = jax.custom_vjp(typed)
    function.defvjp(lambda x: (function(x), None), lambda _, cotangent: (transpose(cotangent),))
    return function
