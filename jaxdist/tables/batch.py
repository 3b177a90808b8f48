"""The table rows of a batch: the rows that each device touches, and their values on the mesh.

The mesh divides a batch into *blocks* of examples, and devices may hold replicas of a block.

Dims: B batch, F fields, D width; N blocks, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdist.models.recommend.rows import RowForm
from jaxdist.models.recommend.tables import PULLED
from jaxdist.sharding import Layout
from jaxdist.tables.keys import touched_rows, unique_rows

Fetch = Callable[[np.ndarray], np.ndarray]
"""A function from unique rows (`[n]`) to their values `[n, D]`."""


@dataclass(frozen=True)
class Touched:
    """The rows that this process's part of a batch touches.

    Attributes:
      rows: the unique rows, ascending, uint32 or keys (`jaxdist.tables.keys`), `[n]`.
      blocks: for each block on this process's devices, the index in `rows` of each unique row of
        the block. The key of a block is the index of its first example in the batch.
      places: for each block, the index of each id's row among the unique rows of the block.
      looked_up: the number of ids. A row that several ids look up counts several times.
    """

    rows: np.ndarray
    blocks: Mapping[int, np.ndarray]
    places: Mapping[int, np.ndarray]
    looked_up: int

    def gathered(self, grads: jax.Array, per_block: int, examples: int) -> np.ndarray:
        """Return the gradient `[n, D]` of each row in `rows`, summed over blocks.

        Args:
          grads: the gradients of the pulled rows of all blocks, `[N per_block, D]`.
          per_block: the number of rows of a block, with padding.
          examples: the number of examples of a block.
        """
        total = np.zeros((len(self.rows), grads.shape[1]), np.float32)
        seen: set[int] = set()
        for shard in grads.addressable_shards:
            block = (shard.index[0].start or 0) // per_block
            if block not in seen:  # Devices that hold the same block have the same gradients.
                seen.add(block)
                places = self.blocks[block * examples]
                total[places] += np.asarray(shard.data)[: len(places)]
        return total


@dataclass
class TableRows:
    """The reader of the table rows that the examples of a batch look up.

    The rows are read from servers in training, and from files in evaluation.

    Attributes:
      form: the sizes and the initial values of the tables.
      layout: the layout of batches on the mesh.
      seed: the seed of initial rows.
      fetch: the function that returns the values of rows, or None before it is known.
      save: the function that saves the tables of a step, or None outside of a run.
    """

    form: RowForm
    layout: Layout
    seed: int = 0
    fetch: Fetch | None = None
    save: Callable[[int], None] | None = None

    @property
    def _sharding(self) -> jax.sharding.NamedSharding:
        return self.layout.sharding(("batch", None))

    def with_rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shapes of a batch's fields by name, with the shape of its pulled rows."""
        examples, fields = batch["ids"].shape[:2]
        shape = (examples * fields, self.form.width)
        pulled = jax.ShapeDtypeStruct(shape, np.float32, sharding=self._sharding)
        ids = jax.ShapeDtypeStruct((examples, fields), np.int32, sharding=self._sharding)
        return {**batch, "ids": ids, PULLED: pulled}

    def touched(self, ids_BF: jax.Array) -> Touched:
        """Return the rows that a batch touches."""
        blocks: dict[int, np.ndarray] = {}
        places: dict[int, np.ndarray] = {}
        looked_up = 0
        for shard in ids_BF.addressable_shards:
            start = shard.index[0].start or 0
            if start in blocks:
                continue
            rows = touched_rows(self.form, np.asarray(shard.data))
            blocks[start], inverse = unique_rows(rows.reshape(-1))
            places[start] = inverse.reshape(rows.shape).astype(np.int32)
            looked_up += rows.size
        unique, inverse = unique_rows(np.concatenate([*blocks.values()]))
        ends = np.cumsum([len(rows) for rows in blocks.values()])
        found = dict(zip(blocks, np.split(inverse, ends[:-1]), strict=True))
        return Touched(unique, found, places, looked_up)

    def filled(self, batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Touched]:
        """Return a batch with the values of the table rows that it looks up, and these rows.

        The ids of the batch are replaced by indices in the values of their block.
        """
        assert self.fetch is not None, "no servers and no files to fetch rows from"
        touched = self.touched(batch["ids"])
        return self.placed(batch, touched, self.fetch(touched.rows)), touched

    def placed(
        self, batch: Mapping[str, jax.Array], touched: Touched, values: np.ndarray
    ) -> dict[str, jax.Array]:
        """Return the fields of a batch by name, with the values of the touched rows in a new field.

        In the result, each id is replaced by the index of its row among the rows of its block.

        Args:
          touched: the rows that the batch touches.
          values: the values `[n, D]` of the touched rows.
        """
        ids = batch["ids"]
        examples, fields = self._sharding.shard_shape(ids.shape[:2])
        per_block = examples * fields

        def block_of_ids(index: Any) -> np.ndarray:
            return touched.places[index[0].start or 0]

        def block_of_rows(index: Any) -> np.ndarray:
            block = np.zeros((per_block, self.form.width), np.float32)
            found = touched.blocks[(index[0].start or 0) // fields]
            block[: len(found)] = values[found]
            return block

        shape = (ids.shape[0] * fields, self.form.width)
        pulled = jax.make_array_from_callback(shape, self._sharding, block_of_rows)
        placed = jax.make_array_from_callback(ids.shape[:2], self._sharding, block_of_ids)
        return {**batch, "ids": placed, PULLED: pulled}


class RowsLoader:
    """A loader of held-out batches, which adds the values of a batch's rows to the batch."""

    def __init__(self, loader: Any, rows: TableRows):
        self._loader, self._rows = loader, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def at_once(self) -> RowsLoader:
        """Return a loader whose evaluation is a single batch, as `Loader.at_once` does."""
        return RowsLoader(self._loader.at_once(), self._rows)

    @contextmanager
    def evaluation_batches(self, limit: int | None = None) -> Iterator[Iterator[dict[str, Any]]]:
        """Return a context with an iterator over batches, as `Loader.evaluation_batches` does."""
        with self._loader.evaluation_batches(limit) as batches:
            yield (self._rows.filled(batch)[0] for batch in batches)
