"""Gathers of rows whose backward passes are gathers too, instead of the scatters of jax.

An index that is out of range reads a row of zeros. Dims: N rows of one array, R rows of another
array, D features. Each of the R rows is a copy of one of the N rows, and J is the maximum number of
copies of a row. Without the dim D, a row is a number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax


def _rows(x_ND: jax.Array, index: jax.Array, any_row: bool = False) -> jax.Array:
    if any_row:
        return x_ND.at[index].get(mode="clip")
    return x_ND.at[index].get(mode="fill", fill_value=0)


def _sums(x_RD: jax.Array, places_NJ: jax.Array) -> jax.Array:
    # A TPU pads the last two dims to whole tiles, so the short dim J comes first.
    return _rows(x_RD, places_NJ.T).sum(0)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(
    x_ND: jax.Array, index_R: jax.Array, places_NJ: jax.Array, any_row: bool = False
) -> jax.Array:
    """Return the rows `x_ND[index_R]`, `[R, D]`.

    Args:
      x_ND: the rows to read.
      index_R: the row of `x_ND` to read for each row of the result. An index after the last row
        gives a row of zeros.
      places_NJ: for each row of `x_ND`, the indices of its copies in the result. Only the backward
        pass reads this array. Unused entries are R.
      any_row: whether an index after the last row may give any row of `x_ND`, which saves a pass
        through memory on a TPU.

    >>> x = jax.numpy.array([[1.0], [2.0]])
    >>> index, places = jax.numpy.array([1, 0, 1, 2]), jax.numpy.array([[1, 4], [0, 2]])
    >>> spread(x, index, places).ravel().tolist()
    [2.0, 1.0, 2.0, 0.0]
    """
    return _rows(x_ND, index_R, any_row)


def _spread_forward(x: jax.Array, index: jax.Array, places: jax.Array, any_row: bool) -> Any:
    return _rows(x, index, any_row), places


def _spread_backward(
    any_row: bool, places: jax.Array, grad: jax.Array
) -> tuple[jax.Array, None, None]:
    return _sums(grad, places), None, None


spread.defvjp(_spread_forward, _spread_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def collected(
    y_RD: jax.Array, places_NJ: jax.Array, index_R: jax.Array, any_row: bool = False
) -> jax.Array:
    """Return sums of rows, `[N, D]`: the transpose of `spread`.

    Args:
      y_RD: the rows to add up.
      places_NJ: for each row of the result, the rows of `y_RD` that are added up. Unused entries
        are R.
      index_R: the row of the result to which each row of `y_RD` is added. Only the backward pass
        reads this array.
      any_row: whether the gradient of a row whose index is after the last row may be any row of the
        result's gradient. The caller must not use such a gradient.
    """
    return _sums(y_RD, places_NJ)


def _collected_forward(y: jax.Array, places: jax.Array, index: jax.Array, any_row: bool) -> Any:
    return _sums(y, places), index


def _collected_backward(
    any_row: bool, index: jax.Array, grad: jax.Array
) -> tuple[jax.Array, None, None]:
    return _rows(grad, index, any_row), None, None


collected.defvjp(_collected_forward, _collected_backward)
