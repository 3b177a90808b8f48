"""The store of one server's rows, which are created by their first update."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from jaxdist.models.recommend.rows import RowForm
from jaxdist.tables.keys import initial_rows, rows_problem, servers_of, unique_rows
from jaxdist.tables.optimizer import RowOptimizer


def reserved(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an array of zeros; the array uses memory only for the pages that are written."""
    size = max(1, prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype, prod(shape)).reshape(shape)


class RowStore:
    """The rows that belong to one of several servers, with their optimizer state.

    A row exists from its first update on, and the existing rows are stored in the order of their
    first updates. The values of any other row are computed from its number when they are read. Such
    a row needs only 4 bytes of address space in an index.

    Args:
      form: the sizes and the initial values of the tables.
      optimizer: the row-wise optimizer.
      seed: the seed of initial rows.
      servers: the number of servers.

    Attributes:
      server: the number of this server.
      touched: the number of rows that exist.
      evicted: the number of rows that were removed to make room for new rows.
    """

    def __init__(
        self,
        form: RowForm,
        optimizer: RowOptimizer,
        seed: int,
        *,
        server: int = 0,
        servers: int = 1,
    ) -> None:
        self.form, self.optimizer, self._seed = form, optimizer, np.array(seed, np.uint32)
        self.server, self._servers = server, servers
        self.columns = self._updated_columns = form.width + optimizer.state_width(form.width)
        self._reserve(servers)
        # Each element of this view is a complete row, because numpy writes a single large element
        # several times faster than a row of elements.
        self._whole = self._values.view(f"V{4 * self.columns}")[:, 0]
        self.touched = self.evicted = 0

    def _reserve(self, servers: int) -> None:
        own = -(-self.form.rows // servers)
        self._slots = reserved((own,), np.int32)
        self._known = reserved((own,), np.uint32)
        self._values = reserved((own, self.columns), np.float32)
        self._changed = reserved((own,), np.bool_)

    def problem(self, rows: np.ndarray) -> str | None:
        """Return why this server cannot have some of the rows, or None if there is no reason."""
        problem = rows_problem(self.form, rows)
        if problem is not None:
            return problem
        if (servers_of(rows, self._servers, self.form.most) != self.server).any():
            return (
                "a row belongs to a different server: start worker and server with the same "
                "number of servers"
            )
        return None

    def _to_update(self, rows: np.ndarray) -> np.ndarray:
        """Return the index in the store of each row, and create the rows that do not exist.

        The rows must be unique. The index is -1 for a row that the store does not keep.
        """
        places = rows // np.uint32(self._servers)
        slots = self._slots[places]
        new = slots == 0
        count = int(np.count_nonzero(new))
        if count:
            begun = slice(self.touched, self.touched + count)
            # The stored index counts from 1, since 0 marks a row that does not exist.
            slots[new] = self._slots[places[new]] = np.arange(
                begun.start + 1, begun.stop + 1, dtype=np.int32
            )
            self._known[begun] = rows[new]
            initial = self.form.initial(self._seed, rows[new])
            self._values[begun, : self.form.width] = initial
            self.touched += count
        return slots - 1

    def _indices(self, rows: np.ndarray) -> np.ndarray:
        """Return the index in the store of each row, which is -1 for rows that do not exist."""
        return self._slots.take(rows // np.uint32(self._servers)) - 1

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the values, float32 `[N, D]`, of rows `[N]`, without creating any row."""
        places = self._indices(rows)
        # For a row that does not exist, the index is -1 and reads the values of another row. These
        # values are replaced below. `take` copies complete rows, which takes a quarter of the time
        # of an index with a slice.
        found = np.ascontiguousarray(self._values.take(places, 0)[:, : self.form.width])
        new = places < 0
        if new.any():
            found[new] = initial_rows(self.form, self._seed, rows[new])
        return found

    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        """Update unique rows by their gradients.

        Args:
          rows: the rows `[N]`.
          grads_ND: the gradient of each row, summed over all examples that look it up. The gradient
            of a row that the store does not keep has no effect.
          rate: the learning rate.
        """
        places = self._to_update(rows)
        kept = places >= 0
        if not kept.all():
            places, grads_ND = places[kept], grads_ND[kept]
        values = self._values.take(places, 0)
        self.optimizer.update(values[:, : self._updated_columns], grads_ND, rate)
        self._write(places, values)
        self._changed[places] = True

    def _write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Replace rows, given their indices, by values with state, float32 `[N, columns]`."""
        self._whole[places] = np.ascontiguousarray(values).view(self._whole.dtype)[:, 0]

    def changed(self) -> np.ndarray:
        """Return the indices of the rows that were updated since the last call of `settle`.

        The indices are positions in the arrays that `kept` returns.
        """
        return np.flatnonzero(self._changed[: self.touched])

    def settle(self) -> None:
        """Forget all updates so far, so that `changed` returns only rows that change later."""
        self._changed[: self.touched] = False

    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all existing rows (uint32), and their values with state, as views of the store."""
        return self._known[: self.touched], self._values[: self.touched]

    def load(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Store the saved rows that belong to this server, with their values and state.

        Args:
          rows: the saved rows of any servers.
        """
        mine = servers_of(rows, self._servers) == self.server
        self._write(self._to_update(rows[mine]), values[mine])


def summed(rows: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return unique rows, ascending, and the sum of the gradients of each row.

    If a row occurs several times, its gradients must be added before an optimizer squares them.

    >>> summed(np.array([7, 3, 7]), np.array([[1.0], [2.0], [3.0]]))
    (array([3, 7]), array([[2.],
           [4.]]))
    """
    unique, places = unique_rows(rows)
    total = np.zeros((len(unique), grads.shape[1]), grads.dtype)
    if len(unique) == len(rows):
        total[places] = grads
    else:
        np.add.at(total, places, grads)
    return unique, total
