"""The tables of a model as a module, and the settings that all recommenders share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.models.hints import Hint, no_hint
from jaxdist.models.recommend.lookup import look_up, look_up_pulled
from jaxdist.models.recommend.rows import MOST_ROWS, RowForm, seed_of
from jaxdist.models.tuning.part import PartConfig

PULLED = "table_rows"
"""The name of the field of a batch that has the rows that were pulled from servers for the
batch."""


class Scored(NamedTuple):
    """The score of each example `[B]`, and the penalty `[B]` on the rows that it looked up."""

    score: jax.Array
    penalty: jax.Array


class RecommenderConfig(PartConfig):
    """The settings of a model with a table for each categorical field of the data."""

    width: Count
    """The number of factors in a row of a table."""
    row_scale: PositiveFloat = 0.1
    """The bound of the initial factors, which are uniform between minus this number and this
    number."""
    penalty: NonNegativeFloat = 0.0
    """The factor of the sum of squares of the rows that an example looks up. The product is added
    to the loss of the example. Unlike optim.weight_decay, the penalty affects only these rows."""
    start: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """The initial value of the bias of all scores, such as the mean rating."""

    def form(self, fields: Mapping[str, int]) -> RowForm:
        """Return the form of the tables for the fields of the data.

        Raises:
          ConfigError: the tables have too many rows for 32-bit ids.
        """
        if sum(fields.values()) > MOST_ROWS:
            raise ConfigError(
                f"the tables of {', '.join(fields)} have {sum(fields.values()):,} rows, but 32-bit "
                f"ids allow at most {MOST_ROWS:,}: set a smaller data.hash_size"
            )
        return RowForm(fields, self.width, self.row_scale)

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        fields: Mapping[str, int],
        dense: int = 0,
        hint: Hint = no_hint,
        served: bool = False,
    ) -> Recommender:
        """Build the module.

        Args:
          fields: the number of ids of each field, by the field's name.
          dense: the number of dense features.
          served: whether parameter servers hold the tables.

        Raises:
          ConfigError: the model does not work with these fields or features.
        """
        return self.on(Tables(self.form(fields), rngs, hint=hint, served=served), rngs, dense)

    @abstractmethod
    def on(self, tables: Tables, rngs: nnx.Rngs, dense: int) -> Recommender:
        """Return the module that looks up rows in the given tables; see `build`."""


class Tables(nnx.Module):
    """The tables of all fields as one parameter with the dims `("rows", None)`.

    Args:
      form: the form of the tables.
      served: whether parameter servers hold the rows; the module then has no parameter.
    """

    def __init__(self, form: RowForm, rngs: nnx.Rngs, *, hint: Hint, served: bool):
        seed = seed_of(rngs.params())
        self.form, self.hint = form, hint
        if not served:
            rows = form.initial(seed, jnp.arange(form.rows, dtype=jnp.uint32), jnp)
            self.rows = nnx.Param(rows, dims=("rows", None))

    def __call__(self, ids_BF: jax.Array, pulled: jax.Array | None = None) -> jax.Array:
        """Return the table rows `[B, F, D]` of a batch's ids.

        Args:
          ids_BF: the ids. An id is an index in the table of its field or, with `pulled`, an index
            in `pulled`.
          pulled: the rows that were pulled for this batch, or None if the module holds the tables.
        """
        if pulled is not None:
            return look_up_pulled(pulled, ids_BF, self.hint)
        offsets = jnp.asarray(self.form.offsets)
        return look_up(self.rows[...], ids_BF + offsets[None, :], self.hint)


class Recommender(nnx.Module):
    """A model that looks up rows of tables, and adds one learned bias to all scores."""

    def __init__(self, config: RecommenderConfig, tables: Tables):
        self.tables = tables
        self.bias = nnx.Param(jnp.full((1,), config.start, jnp.float32), dims=("classes",))
        self.penalty = config.penalty

    def scored(self, score: jax.Array, rows_BFD: jax.Array) -> Scored:
        """Add the bias to scores `[B]`, and compute the penalty on the looked-up rows."""
        return Scored(score + self.bias[...], self.penalty * jnp.square(rows_BFD).sum((1, 2)))
