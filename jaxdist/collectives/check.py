"""Checks of the arguments of collectives. The errors name the operation.

In all functions, `operation` is the name of the collective for error messages.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.axis import Axis, CollectiveError
from jaxdist.collectives.contract import Algorithm, Combine
from jaxdist.errors import did_you_mean

COMBINE: dict[str, Combine] = {"sum": lax.add, "mean": lax.add, "max": lax.max, "min": lax.min}


def array(x: object, operation: str) -> jax.Array:
    """Convert `x` to an array of numbers or bools.

    Raises:
      CollectiveError: `x` is a tree, a string or an array of random keys.
    """
    try:
        found = jnp.asarray(x)
    except (TypeError, ValueError):
        raise CollectiveError(
            f"{operation} expects a single array, not a {type(x).__name__}: use jax.tree.map, or "
            "reduce_tree for the leaves of a pytree"
        ) from None
    if jnp.issubdtype(found.dtype, jax.dtypes.extended):
        raise CollectiveError(
            f"{operation} of {found.dtype} is not defined: pass an array of numbers "
            "(jax.random.key_data converts random keys)"
        )
    return found


def combine_of(op: str, x: jax.Array, operation: str) -> Combine:
    """Return the function that combines two arrays for an `op` such as "sum".

    Raises:
      CollectiveError: the op is unknown, or is not defined for the dtype of `x`.
    """
    if op not in COMBINE:
        raise CollectiveError(f"{operation} with op={op!r}: {did_you_mean(op, COMBINE)}")
    what = f"{operation} with op={op!r} of {x.dtype}{list(x.shape)}"
    if op in ("sum", "mean") and x.dtype == jnp.bool_:
        raise CollectiveError(
            f"{what} is not defined: cast to int32 to count, or use op='max' (any) or op='min' "
            "(all)"
        )
    if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise CollectiveError(
            f"{what}: the mean of integers is not an integer; cast to float32, or use op='sum'"
        )
    if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise CollectiveError(
            f"{what}: complex numbers have no order; reduce real numbers, such as jnp.abs(x)"
        )
    return COMBINE[op]


def check_algorithm(algorithm: object, operation: str) -> None:
    """Raise CollectiveError if `algorithm` is not an instance of `Algorithm`."""
    if not isinstance(algorithm, Algorithm):
        raise CollectiveError(
            f"{operation} with algorithm={algorithm!r}: pass an instance of an algorithm, such as "
            "Ring() or Xla()"
        )


def root_of(root: object, axis: Axis, size: int, operation: str) -> int:
    """Return the root as an `int`, the index of a device along the axis.

    Raises:
      CollectiveError: the root is traced, or is not the index of a device of the axis.
    """
    index = _index(root, f"{operation} over {axis!r}: root")
    if not 0 <= index < size:
        raise CollectiveError(
            f"{operation} over {axis!r}: root {index} is out of range: the axis has {size} "
            f"devices, so use 0 to {size - 1}"
        )
    return index


def dim_of(dim: object, x: jax.Array, name: str, operation: str) -> int:
    """Return the index of a dim of `x`, counted from the first dim; `dim` may be negative.

    Raises:
      CollectiveError: `x` has no such dim, or the index is traced.
    """
    index = _index(dim, f"{operation}: {name}")
    if not -x.ndim <= index < x.ndim:
        raise CollectiveError(
            f"{operation}: {name} {index} is out of range for shape {list(x.shape)}"
            + ("; reshape the scalar to [1]" if x.ndim == 0 else "")
        )
    return index % x.ndim


def gathered_size(size: object, total: int, axis: Axis, operation: str) -> int:
    """Return the number of elements to keep of a gathered dim.

    Args:
      size: the number, or None for all elements.
      total: the number of elements of the gathered dim.
      axis: the axis of the collective, for error messages.
      operation: the name of the collective.

    Raises:
      CollectiveError: the size is negative, larger than `total` or traced.
    """
    index = total if size is None else _index(size, f"{operation} over {axis!r}: size")
    if not 0 <= index <= total:
        raise CollectiveError(
            f"{operation} over {axis!r}: size {index} is out of range: the gathered dim has "
            f"{total} elements, so use 0 to {total}"
        )
    return index


def check_counts(count: int, values: Sequence[object], name: str, operation: str) -> None:
    """Raise CollectiveError if the number of values is not the number of tensors.

    Args:
      count: the number of tensors.
      values: the values, one for each tensor.
      name: the name of the values, for error messages.
      operation: the name of the collective.
    """
    if len(values) != count:
        raise CollectiveError(
            f"{operation}: {len(values)} {name} were passed for {count} tensors; pass as many "
            f"{name} as tensors"
        )


def check_divides(x: jax.Array, dim: int, axis: Axis, size: int, operation: str) -> None:
    """Raise CollectiveError if the axis size `size` does not divide the length of dim `dim`."""
    if x.shape[dim] % size:
        padded = -(-x.shape[dim] // size) * size
        raise CollectiveError(
            f"{operation} over {axis!r} ({size} devices): split_dim {dim} of shape {list(x.shape)} "
            f"does not divide by {size}; pad the dim to {padded}"
        )


def _index(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise CollectiveError(
            f"{what} must be a whole number known at trace time, not {value!r}"
        ) from None
