"""The division of a batch into microbatches."""

from __future__ import annotations

import jax

from jaxdist.sharding import Layout
from jaxdist.types import PyTree


def split_rows(batch: PyTree, count: int, layout: Layout) -> PyTree:
    """Divide a batch into microbatches, from leaves `[rows, ...]` to `[count, rows / count, ...]`.

    Microbatch k has the rows k, k + count, k + 2 count, and so on. Each device therefore divides
    the rows that it holds, and sends no rows.
    """

    def leaf(x: jax.Array) -> jax.Array:
        pieces = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return layout(pieces, None, "batch", *(None,) * (x.ndim - 1))

    return jax.tree.map(leaf, batch)
