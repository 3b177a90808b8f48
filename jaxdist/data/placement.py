"""Which rows of a global batch a process needs, and how they become global arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from jaxdist.errors import DataError, ShardingError

Shape = tuple[int, ...]
Index = tuple[slice, ...]
Shardings = Mapping[str, jax.sharding.Sharding] | Callable[[str, Shape], jax.sharding.Sharding]


def rows_needed(grid: np.ndarray, indices: Iterable[Index]) -> np.ndarray:
    """The sorted rows (int64 [N]) that blocks of a batch touch.

    Args:
      grid: row numbers, laid out as the leading dims of the batch.
      indices: one index of the global array for each block; only its leading dims matter here.

    >>> rows_needed(np.arange(8).reshape(2, 4), [(slice(None), slice(2, 4), slice(0, 1))])
    array([2, 3, 6, 7])
    """
    blocks = [grid[index[: grid.ndim]].ravel() for index in indices]
    return np.unique(np.concatenate(blocks))


def block(local: np.ndarray, rows: np.ndarray, grid: np.ndarray, index: Index) -> np.ndarray:
    """The block `index` of a global array, out of the rows that were read.

    Args:
      local: values [len(rows), ...].
      rows: the sorted rows that `local` holds.
      grid: as in `rows_needed`.
      index: which block of the global array [*grid.shape, ...].
    """
    if len(rows) == grid.size:
        return local.reshape(*grid.shape, *local.shape[1:])[index]
    wanted = np.searchsorted(rows, grid[index[: grid.ndim]])
    return local[(wanted, *index[grid.ndim :])]


class Placement:
    """The layout of one kind of batch on the devices of this process."""

    def __init__(self, shapes: Mapping[str, Shape], leading: Shape, sharding: Shardings):
        """`shapes` are those of one example; `leading` are the batch's own dims.

        Raises:
          DataError: `sharding` has no entry for a name.
          ShardingError: a batch that cannot be split as its sharding says.
        """
        self._grid = np.arange(math.prod(leading)).reshape(leading)
        self._shapes = {name: (*leading, *shape) for name, shape in shapes.items()}
        self._shardings = {
            name: _sharding_of(name, shape, sharding) for name, shape in self._shapes.items()
        }
        self.rows = rows_needed(
            self._grid,
            (
                index
                for name, shape in self._shapes.items()
                for index in _blocks(name, shape, self._shardings[name])
            ),
        )

    def place(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays out of the values [len(rows), ...] of this process's rows."""
        return {name: self._place(name, values) for name, values in local.items()}

    def _place(self, name: str, local: np.ndarray) -> jax.Array:
        def local_block(index: Index | None) -> np.ndarray:
            assert index is not None
            return block(local, self.rows, self._grid, index)

        return jax.make_array_from_callback(self._shapes[name], self._shardings[name], local_block)


def _sharding_of(name: str, shape: Shape, sharding: Shardings) -> jax.sharding.Sharding:
    if callable(sharding):
        return sharding(name, shape)
    if name not in sharding:
        raise DataError(
            f"data: no sharding for {name!r} {shape}; there are shardings for "
            f"{', '.join(sorted(sharding))}"
        )
    return sharding[name]


def _blocks(name: str, shape: Shape, sharding: jax.sharding.Sharding) -> list[Index]:
    try:
        indices = sharding.addressable_devices_indices_map(shape).values()
    except ValueError as error:
        raise ShardingError(
            f"data: the global batch {name!r} {shape} cannot be split: {error}; make "
            "batch_size a multiple of the devices that share it"
        ) from error
    return [index for index in indices if index is not None]
