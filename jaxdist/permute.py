"""Gathers of rows whose gradients are gathers too, where jax would scatter.

An index that is out of range gives a row of zeros. Dims: N, R rows of two arrays, J places of a row
of the first in the second, D features.
"""

from __future__ import annotations

from typing import Any

import jax


def _rows(x_ND: jax.Array, index: jax.Array) -> jax.Array:
    return x_ND.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x_ND: jax.Array, index_R: jax.Array, places_NJ: jax.Array) -> jax.Array:
    """Return `x_ND[index_R]`.

    Args:
      places_NJ: the positions in `index_R` at which each row of x is read.

    >>> x = jax.numpy.array([[1.0], [2.0]])
    >>> index, places = jax.numpy.array([1, 0, 1, 2]), jax.numpy.array([[1, 4], [0, 2]])
    >>> spread(x, index, places).ravel().tolist()
    [2.0, 1.0, 2.0, 0.0]
    """
    return _rows(x_ND, index_R)


def _spread_forward(x: jax.Array, index: jax.Array, places: jax.Array) -> Any:
    return _rows(x, index), places


def _spread_backward(places: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, None]:
    return _rows(grad, places).sum(1), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collected(y_RD: jax.Array, places_NJ: jax.Array, index_R: jax.Array) -> jax.Array:
    """Return `[N, D]`, whose row n is the sum of the rows of y at `places_NJ[n]`.

    The function is the transpose of `spread`.

    Args:
      index_R: the row of the result to which each row of y is added.
    """
    return _rows(y_RD, places_NJ).sum(1)


def _collected_forward(y: jax.Array, places: jax.Array, index: jax.Array) -> Any:
    return _rows(y, places).sum(1), index


def _collected_backward(index: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, None]:
    return _rows(grad, index), None, None


collected.defvjp(_collected_forward, _collected_backward)
