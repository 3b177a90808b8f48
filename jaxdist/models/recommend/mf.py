"""A model of ratings by biased matrix factorisation.

Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems" (IEEE Computer
42, 2009), equation 4.

Dims: B batch, F fields, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import jax
from flax import nnx

from jaxdist.errors import ConfigError
from jaxdist.models.recommend.rows import RowForm
from jaxdist.models.recommend.tables import Recommender, RecommenderConfig, Scored, Tables


class MfConfig(RecommenderConfig):
    """Biased matrix factorisation of two fields: start + b_user + b_item + p_user . q_item."""

    type: Literal["mf"]
    """The name that selects this model in a config."""

    def form(self, fields: Mapping[str, int]) -> RowForm:
        """Return the form of the tables: a row has factors, and then a bias that begins at zero."""
        return replace(super().form(fields), width=self.width + 1, zeros=1)

    def on(self, tables: Tables, rngs: nnx.Rngs, dense: int) -> Mf:
        """Return the module for data with two fields.

        Raises:
          ConfigError: the data does not have exactly two fields, or it has dense features.
        """
        fields = tables.form.fields
        if len(fields) != 2 or dense:
            more = f" and {dense} dense features" if dense else ""
            raise ConfigError(
                "model.type mf multiplies the embeddings of two fields, but the data has the "
                f"fields {', '.join(fields)}{more}: choose two fields, or model.type dlrm"
            )
        return Mf(self, tables)


class Mf(Recommender):
    """Matrix factorisation with a global bias; each row of a table has factors and a bias."""

    def __call__(
        self, ids_BF: jax.Array, dense: jax.Array | None = None, pulled: jax.Array | None = None
    ) -> Scored:
        """Return the score of each pair of ids `[B, 2]`, and the penalty on the looked-up rows.

        Args:
          pulled: the rows that were pulled for this batch, or None if the module holds the tables.
        """
        rows_BFD = self.tables(ids_BF, pulled)
        factors, biases = rows_BFD[..., :-1], rows_BFD[..., -1]
        score = (factors[:, 0] * factors[:, 1]).sum(-1) + biases.sum(-1)
        return self.scored(score, rows_BFD)
