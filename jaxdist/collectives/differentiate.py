"""Differentiable collectives, whose backward passes run by the same algorithm.

Each function takes and returns flat arrays, like the methods of `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import Axis, CollectiveError, rank, varying
from jaxdist.collectives.contract import Algorithm, Combine, Operation

Function = Callable[[jax.Array], jax.Array]
TRANSPOSES: Mapping[Operation, Operation] = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_to_all": "all_to_all",
}
"""The operation that runs in the backward pass of each operation."""


def called(
    kind: Operation,
    algorithm: Algorithm,
    axis: Axis,
    x: jax.Array,
    *,
    combine: Combine = lax.add,
    root: int = 0,
) -> jax.Array:
    """Call the method of an algorithm for an operation, with the arguments that the method takes.

    A reduction to a root returns zeros on the other devices.
    """
    given: dict[str, object] = {"axis": axis}
    if kind in ("all_reduce", "reduce_scatter", "reduce"):
        given["combine"] = combine
    if kind in ("broadcast", "reduce"):
        given["root"] = root
    found = getattr(algorithm, kind)(x, **given)
    return (
        jnp.where(rank(axis) == root, found, jnp.zeros_like(found)) if kind == "reduce" else found
    )


def linear(
    kind: Operation, algorithm: Algorithm, axis: Axis, x: jax.Array, *, root: int = 0
) -> jax.Array:
    """Run an operation that sums or copies, and whose backward pass runs the transposed operation.

    JAX itself differentiates a native algorithm.
    """
    forward = partial(called, kind, algorithm, axis, root=root)
    if algorithm.native:
        return forward(x)
    transpose = partial(linear, TRANSPOSES[kind], algorithm, axis, root=root)

    def typed(x: jax.Array) -> jax.Array:
        # `forward` may use a native algorithm, whose result jax types as replicated. The cotangent
        # has the type of the result, and must be varying so that it can be summed.
        return varying(forward(x), axis)

    typed.__name__ = f"jaxdist_{kind}"  # `jaxdist.proofs` finds the operation by this name
    function = jax.custom_vjp(typed)
    function.defvjp(lambda x: (function(x), None), lambda _, cotangent: (transpose(cotangent),))
    return function(x)


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
