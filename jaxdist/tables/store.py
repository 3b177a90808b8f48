"""The rows of one server: created by their first update, found by an index, updated in place."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np

from jaxdist.models.recommend.rows import RowForm
from jaxdist.tables.optimizer import RowOptimizer


def _reserved(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return zeros whose memory is taken only where it is written."""
    size = max(1, prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype, prod(shape)).reshape(shape)


def servers_of(rows: np.ndarray, servers: int) -> np.ndarray:
    """Return the server of each row; neighbours, such as the rows of a small table, are spread."""
    return rows % np.uint32(servers)


class RowStore:
    """The rows that one of several servers owns, with their optimizer state.

    A row that is only read is computed, since its initial value follows from its number. It takes 4
    bytes of address space in the index and none elsewhere; rows lie in the order of their first
    update.

    Args:
      seed: seed of initial rows.

    Attributes:
      server: number of the server, which is that of its rows.
      touched: number of rows that exist.
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
        own = -(-form.rows // servers)
        self.columns = form.width + optimizer.state_width(form.width)
        self._slots = _reserved((own,), np.int32)
        self._known = _reserved((own,), np.uint32)
        self._values = _reserved((own, self.columns), np.float32)
        self.touched = 0

    def problem(self, rows: np.ndarray) -> str | None:
        """Return why this server cannot hold some rows, or None if it can."""
        if not len(rows):
            return None
        if int(rows.max()) >= self.form.rows:
            return f"row {rows.max()} of tables with {self.form.rows} rows"
        if (servers_of(rows, self._servers) != self.server).any():
            return "a row of another server: both sides need the same number of servers"
        return None

    def _found(self, rows: np.ndarray) -> np.ndarray:
        """Return the slots of unique rows, creating those that do not exist."""
        places = rows // np.uint32(self._servers)
        slots = self._slots[places]
        new = slots == 0
        count = int(np.count_nonzero(new))
        if count:
            begun = slice(self.touched, self.touched + count)
            # Slots count from 1, since 0 marks a row that does not exist.
            slots[new] = self._slots[places[new]] = np.arange(
                begun.start + 1, begun.stop + 1, dtype=np.int32
            )
            self._known[begun] = rows[new]
            initial = self.form.initial(self._seed, rows[new])
            self._values[begun, : self.form.width] = initial
            self.touched += count
        return slots - 1

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the values, float32 `[N, D]`, of rows (uint32 `[N]`), without creating any row."""
        slots = self._slots[rows // np.uint32(self._servers)]
        found = self._values[slots - 1, : self.form.width]
        new = slots == 0
        if new.any():
            found[new] = self.form.initial(self._seed, rows[new])
        return found

    def update(self, rows: np.ndarray, grads_ND: np.ndarray, rate: float) -> None:
        """Update unique rows by gradients that are summed over all their uses."""
        slots = self._found(rows)
        values = self._values[slots]
        self.optimizer.update(values, grads_ND, rate)
        self._values[slots] = values

    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all touched rows (uint32) and their values with their state, for a checkpoint."""
        return self._known[: self.touched], self._values[: self.touched]

    def load(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Take those of saved rows that this server owns."""
        mine = servers_of(rows, self._servers) == self.server
        self._values[self._found(rows[mine])] = values[mine]


def summed(rows: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return unique rows, ascending, and the sum of the gradients of each.

    Gradients of a row that occurs several times are added before an optimizer squares them.

    >>> summed(np.array([7, 3, 7]), np.array([[1.0], [2.0], [3.0]]))
    (array([3, 7]), array([[2.],
           [4.]]))
    """
    unique, places = np.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return unique, grads[np.argsort(rows)]
    total = np.zeros((len(unique), grads.shape[1]), grads.dtype)
    np.add.at(total, places, grads)
    return unique, total
