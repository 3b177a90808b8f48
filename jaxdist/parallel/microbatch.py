"""Splitting of batches into pieces that are processed in sequence."""

from __future__ import annotations

import jax

from jaxdist.sharding import Layout
from jaxdist.types import PyTree


def split_rows(batch: PyTree, count: int, layout: Layout) -> PyTree:
    """Reshape leaves `[rows, ...]` to `[count, rows / count, ...]`.

    Microbatch k has every count-th row, so that each device splits its own rows and sends none.
    """

    def leaf(x: jax.Array) -> jax.Array:
        pieces = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return layout(pieces, None, "batch", *(None,) * (x.ndim - 1))

    return jax.tree.map(leaf, batch)
