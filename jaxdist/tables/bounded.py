"""The store of a bounded number of rows, in which new rows replace the rows updated longest ago.

Each key belongs to a set (`jaxdist.tables.keys`). A set keeps the `WAYS` rows that were updated
last. If several rows have the same last update, the set keeps the rows with the smallest keys. A
row that its set does not keep returns to its initial values. This rule depends neither on the
number of servers nor on the order in which saved rows are loaded. Set-associative caches use the
same rule (Hill and Smith, "Evaluating associativity in CPU caches", IEEE Transactions on Computers
38, 1989).
"""

from __future__ import annotations

import numpy as np

from jaxdist.models.recommend.rows import RowForm
from jaxdist.tables.keys import KEY, WAYS, hashes, initial_rows, servers_of, sets_of_hashes
from jaxdist.tables.optimizer import RowOptimizer
from jaxdist.tables.store import RowStore, reserved


class BoundedStore(RowStore):
    """A `RowStore` of rows with keys, of which all servers together keep at most `form.most`.

    The last column of a row's values has the number of the row's last update, a uint32 whose bits
    are stored as a float32.

    Attributes:
      version: the number of updates so far.
    """

    def _reserve(self, servers: int) -> None:
        count = max(1, self.form.most // WAYS)
        own = -(-count // servers)
        self.columns += 1
        self.version = 0
        self._tags = reserved((own, WAYS), np.uint32)
        self._places = reserved((own, WAYS), np.int32)
        self._known = reserved((own * WAYS,), KEY)
        self._values = reserved((own * WAYS, self.columns), np.float32)
        self._changed = reserved((own * WAYS,), np.bool_)

    def _looked_up(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each row's set on this server, its tag, and its index in the arrays of values.

        The index is -1 for a row that the store does not have.
        """
        hashed = hashes(rows)
        sets = sets_of_hashes(hashed, self.form.most) // self._servers
        # The tag 0 marks an unused position in a set, so the tags of rows are odd.
        tags = hashed.astype(np.uint32) | np.uint32(1)
        hits = np.flatnonzero(self._tags.take(sets, 0) == tags[:, None])
        at, way = hits // WAYS, hits % WAYS
        places = self._places.reshape(-1).take(sets.take(at) * WAYS + way)
        # Several rows of a set may have the same tag, so their keys are compared too.
        same = self._known.take(places) == rows.take(at)
        found = np.full(len(rows), -1, np.int64)
        found[at[same]] = places[same]
        return sets, tags, found

    def _indices(self, rows: np.ndarray) -> np.ndarray:
        return self._looked_up(rows)[2]

    def _to_update(self, rows: np.ndarray) -> np.ndarray:
        """Return the index in the store of each row, and count an update.

        If more than `WAYS` of the rows belong to the same set, the set keeps `WAYS` of them.
        """
        self.version += 1
        return self._placed(rows, np.full(len(rows), self.version, np.uint32))

    def load(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Store the saved rows that belong to this server, with their values, state and versions.

        A row replaces an earlier loaded row with the same key.
        """
        mine = servers_of(rows, self._servers, self.form.most) == self.server
        rows, values = rows[mine], values[mine]
        versions = _versions(values)
        places = self._placed(rows, versions)
        kept = places >= 0
        self._write(places[kept], values[kept])
        self.version = max(self.version, int(versions.max(initial=0)))

    def _placed(self, rows: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """Store the new rows that their sets keep, and return the index of each row.

        The index is -1 for a row that its set does not keep.

        Args:
          rows: unique rows.
          versions: the number of each row's last update, uint32 `[N]`. If the store has the row
            already, the number is at least as large as the stored number.
        """
        sets, tags, places = self._looked_up(rows)
        old, new = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
        self._values[places[old], -1] = versions[old].view(np.float32)
        if not len(new):
            return places
        touched, inverse = np.unique(sets[new], return_inverse=True)
        taken = self._tags.take(touched, 0) != 0
        stays, left = self._evict(touched, taken, inverse, versions[new], rows[new])
        gone = np.zeros(self.touched, np.bool_)
        gone[left] = True
        places[old[gone[places[old]]]] = -1
        new, inverse = new[stays], inverse[stays]
        ranks = _ranks(inverse).astype(np.uint8)
        # If the set has r earlier new rows in this call, the row takes the free position r of its
        # set, counted from 0.
        free = (np.cumsum(~taken, 1, dtype=np.uint8).take(inverse, 0) > ranks[:, None]).argmax(1)
        where = (touched[inverse], free)
        # The position of a row that was evicted still has the index of the row's values. The new
        # row takes this position and overwrites these values.
        empty = self._tags[where] == 0
        count = int(np.count_nonzero(empty))
        found = self._places[where].astype(np.int64)
        found[empty] = np.arange(self.touched, self.touched + count)
        self.touched += count
        self._tags[where], self._places[where], self._known[found] = tags[new], found, rows[new]
        self._values[found] = 0
        self._values[found, : self.form.width] = initial_rows(self.form, self._seed, rows[new])
        self._values[found, -1] = versions[new].view(np.float32)
        places[new] = found
        return places

    def _evict(
        self,
        sets: np.ndarray,
        taken: np.ndarray,
        inverse: np.ndarray,
        versions: np.ndarray,
        rows: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each new row is kept by its set, and the indices of the evicted rows.

        Args:
          sets: the unique sets of the new rows.
          taken: for each position in `sets`, whether it has a row. The function sets the positions
            of evicted rows to false.
          inverse: the index in `sets` of each new row's set.
          versions, rows: the numbers of the last updates and the keys of the new rows.
        """
        # Most sets have free positions, so only sets with more rows than positions are examined.
        crowded = taken.sum(1) + np.bincount(inverse) > WAYS
        rivals = np.flatnonzero(crowded[inverse])
        at, way = np.nonzero(taken & crowded[:, None])
        own = self._places[sets[at], way]
        kept = _stays(
            np.concatenate([at, inverse[rivals]]),
            np.concatenate([_versions(self._values[own]), versions[rivals]]),
            np.concatenate([self._known[own], rows[rivals]]),
        )
        leaves = ~kept[: len(at)]
        taken[at[leaves], way[leaves]] = False
        self.evicted += int(np.count_nonzero(leaves))
        stays = np.ones(len(rows), np.bool_)
        stays[rivals] = kept[len(at) :]
        return stays, own[leaves]


def open_store(
    form: RowForm, optimizer: RowOptimizer, seed: int, *, server: int = 0, servers: int = 1
) -> RowStore:
    """Return an empty store of all rows or, with `form.most`, of a bounded number of rows.

    Args:
      form: the sizes and the initial values of the tables.
      optimizer: the row-wise optimizer.
      seed: the seed of initial rows.
      server: the number of this server.
      servers: the number of servers.
    """
    kind = BoundedStore if form.most else RowStore
    return kind(form, optimizer, seed, server=server, servers=servers)


def _versions(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values[:, -1]).view(np.uint32)


def _ranks(groups: np.ndarray) -> np.ndarray:
    """Return, for each element, the number of earlier elements of the same group.

    >>> _ranks(np.array([4, 7, 4, 4, 7]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    found = np.empty(len(groups), np.int64)
    found[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return found


def _stays(sets: np.ndarray, versions: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return whether each row is among the `WAYS` rows of its set with the newest versions."""
    order = np.lexsort((rows["id"], rows["field"], ~versions))
    found = np.empty(len(sets), np.bool_)
    found[order] = _ranks(sets[order]) < WAYS
    return found
