"""DLRM (Naumov et al., "Deep learning recommendation model", arXiv 1906.00091).

Dims: B batch, F fields, D width, K vectors that interact.
"""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field

from jaxdist.config.schema import Count
from jaxdist.models.layers import DenseTower
from jaxdist.models.recommend.tables import Recommender, RecommenderConfig, Scored, Tables

Widths = Annotated[tuple[Count, ...], Field(min_length=1)]


class DlrmConfig(RecommenderConfig):
    """A top MLP on the pairwise dot products of table rows and of the output of a bottom MLP."""

    type: Literal["dlrm"]
    """The name that selects this model in a config."""
    bottom: Widths = (64,)
    """The width of each hidden layer of the MLP on dense features, whose output has `width` values.
    The setting has no effect on data without dense features."""
    top: Widths = (64, 32)
    """The width of each hidden layer of the MLP on the dot products."""

    def on(self, tables: Tables, rngs: nnx.Rngs, dense: int) -> Dlrm:
        """Return the module for any number of fields and of dense features."""
        return Dlrm(self, tables, rngs, dense)


class Dlrm(Recommender):
    """A model of tables, a bottom MLP, dot products of all pairs of vectors, and a top MLP."""

    def __init__(self, config: DlrmConfig, tables: Tables, rngs: nnx.Rngs, dense: int):
        sizes, fields, hint = [dense, *config.bottom, config.width], tables.form.fields, tables.hint
        self.bottom = DenseTower(sizes, rngs, hint) if dense else None
        vectors = len(fields) + bool(dense)
        first = config.width * (1 if dense else len(fields))
        pairs = vectors * (vectors - 1) // 2
        self.top = DenseTower([first + pairs, *config.top, 1], rngs, hint)
        super().__init__(config, tables)

    def __call__(
        self, ids_BF: jax.Array, dense: jax.Array | None = None, pulled: jax.Array | None = None
    ) -> Scored:
        """Return the logit of each example, and the penalty on the looked-up rows.

        Args:
          ids_BF: the ids of each example, or indices in `pulled`.
          dense: the dense features, `[B, C]`, or None if the data has none.
          pulled: the rows that were pulled for this batch, or None if the module holds the tables.
        """
        rows_BFD = self.tables(ids_BF, pulled)
        if self.bottom is None:
            vectors_BKD, first = rows_BFD, rows_BFD.reshape(rows_BFD.shape[0], -1)
        else:
            assert dense is not None
            first = jax.nn.relu(self.bottom(dense))
            vectors_BKD = jnp.concatenate([first[:, None], rows_BFD], 1)
        products_BKK = jnp.einsum("bkd,bjd->bkj", vectors_BKD, vectors_BKD)
        i, j = np.triu_indices(vectors_BKD.shape[1], 1)
        features = jnp.concatenate([first, products_BKK[:, i, j]], -1)
        return self.scored(self.top(features)[:, 0], rows_BFD)
