"""The rows of a global batch that a process needs, and the assembly of rows into global arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from jaxdist.errors import ShardingError

Shape = tuple[int, ...]
Index = tuple[slice, ...]
Shardings = Callable[[str, Shape], jax.sharding.Sharding]


def rows_needed(batch_size: int, indices: Iterable[Index]) -> np.ndarray:
    """Return the sorted indices (int64 [N]) of the rows that any of the blocks of a batch contains.

    Args:
      batch_size: the number of rows in the global batch.
      indices: for each block, its index in the global array; only the entry for the first dim is
        used.

    >>> rows_needed(8, [(slice(2, 4), slice(0, 1)), (slice(6, None),)])
    array([2, 3, 6, 7])
    """
    rows = np.arange(batch_size)
    return np.unique(np.concatenate([rows[index[0]] for index in indices]))


def cut_block(local: np.ndarray, rows: np.ndarray, batch_size: int, index: Index) -> np.ndarray:
    """Cut the block at `index` of a global array from the rows that this process has read.

    Args:
      local: the values of the rows, [len(rows), ...].
      rows: the sorted indices of the rows in `local`.
      batch_size: the number of rows in the global batch.
      index: the index of the block in the global array [batch_size, ...].
    """
    # If this process has all rows, a slice is a view, but the lookup by positions below copies.
    if len(rows) == batch_size:
        return local[index]
    wanted = np.searchsorted(rows, np.arange(batch_size)[index[0]])
    return local[(wanted, *index[1:])]


class BatchPlacement:
    """The layout of batches, which all have the same shapes, on the devices of this process."""

    def __init__(self, shapes: Mapping[str, Shape], batch_size: int, sharding: Shardings):
        """Plan the layout of batches on the devices.

        Args:
          shapes: the shapes of a single example, by name.
          batch_size: the number of rows in the global batch.
          sharding: the sharding of each array; see `Loader`.

        Raises:
          ShardingError: the sharding cannot split the batch.
        """
        self._batch_size = batch_size
        self._shapes = {name: (batch_size, *shape) for name, shape in shapes.items()}
        self._shardings = {name: sharding(name, shape) for name, shape in self._shapes.items()}
        self.rows = rows_needed(
            self._batch_size,
            (
                index
                for name, shape in self._shapes.items()
                for index in _blocks(name, shape, self._shardings[name])
            ),
        )

    def struct(self, name: str, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of the global array with this name."""
        return jax.ShapeDtypeStruct(self._shapes[name], dtype, sharding=self._shardings[name])

    def place(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Build global arrays from the values [len(rows), ...] of this process's rows."""
        return {name: self._place(name, values) for name, values in local.items()}

    def _place(self, name: str, local: np.ndarray) -> jax.Array:
        def local_block(index: Index | None) -> np.ndarray:
            assert index is not None
            return cut_block(local, self.rows, self._batch_size, index)

        return jax.make_array_from_callback(self._shapes[name], self._shardings[name], local_block)


def _blocks(name: str, shape: Shape, sharding: jax.sharding.Sharding) -> list[Index]:
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ShardingError(
            f"data: the array {name!r} {shape} of the global batch cannot be split: {error}; use a "
            "batch_size that is a multiple of the number of devices that split the batch"
        ) from error
    return [index for index in indices if index is not None]
