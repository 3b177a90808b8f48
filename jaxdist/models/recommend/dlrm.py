"""DLRM (Naumov et al., "Deep learning recommendation model", arXiv 1906.00091).

Dims: B batch, F fields, D width, K vectors that interact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import Field

from jaxdist.config.schema import Count
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.layers import Linear
from jaxdist.models.recommend.tables import RecommenderConfig, Scored, Tables, penalty_of

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

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        fields: Mapping[str, int],
        dense: int = 0,
        hint: Hint = no_hint,
        served: bool = False,
    ) -> Dlrm:
        """Build the module for any number of fields and of dense features.

        Args:
          fields: the number of ids of each field, by the field's name.
          dense: the number of dense features.
          served: whether parameter servers hold the tables.
        """
        return Dlrm(self, rngs, fields=fields, dense=dense, hint=hint, served=served)


class Dlrm(nnx.Module):
    """A model of tables, a bottom MLP, dot products of all pairs of vectors, and a top MLP."""

    def __init__(
        self,
        config: DlrmConfig,
        rngs: nnx.Rngs,
        *,
        fields: Mapping[str, int],
        dense: int,
        hint: Hint,
        served: bool,
    ):
        self.tables = Tables(config.form(fields), rngs, hint=hint, served=served)
        self.bottom = (
            DenseTower([dense, *config.bottom, config.width], rngs, hint) if dense else None
        )
        vectors = len(fields) + bool(dense)
        first = config.width * (1 if dense else len(fields))
        pairs = vectors * (vectors - 1) // 2
        self.top = DenseTower([first + pairs, *config.top, 1], rngs, hint)
        self.bias = nnx.Param(jnp.full((1,), config.start, jnp.float32), dims=("classes",))
        self.penalty = config.penalty

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
        score = self.top(features)[:, 0] + self.bias[...]
        return Scored(score, penalty_of(rows_BFD, self.penalty))


class DenseTower(nnx.Module):
    """Linear layers with ReLU between them.

    For tensor parallelism, layers alternate: a layer that splits its outputs is followed by a layer
    that splits its inputs.
    """

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs, hint: Hint):
        hidden = [("mlp", "embed")[i % 2] for i in range(len(sizes) - 2)]
        names = ["features", *hidden, "classes"]
        init = nnx.initializers.he_normal()
        self.layers = nnx.List(
            Linear((sizes[i], sizes[i + 1]), (names[i], names[i + 1]), rngs, init=init)
            for i in range(len(sizes) - 1)
        )
        self.names, self.hint = tuple(hidden), hint

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs `[B, out]` of the layers for inputs x `[B, in]`."""
        for layer, name in zip(list(self.layers)[:-1], self.names, strict=True):
            x = self.hint(jax.nn.relu(layer(x)), "batch", name)
        return self.layers[-1](x)
