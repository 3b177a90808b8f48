"""The numbers of rows on servers: 32-bit numbers, or keys.

A *key* consists of the number of a field and a 64-bit id.

Rows have keys if servers keep a bounded number of rows (`RowForm.most`). Hashes divide all keys
into *sets*, whose number depends on nothing but the bound. A set is on a single server.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdist.data.permutation import mix
from jaxdist.models.recommend.rows import RowForm

KEY = np.dtype([("field", "<u4"), ("id", "<u8")])
WAYS = 32
"""The largest number of rows that a bounded store keeps in a set."""


def row_dtype(most: int) -> np.dtype:
    """Return the dtype of row numbers: `KEY` with a bound on the rows, or uint32 if `most` is 0."""
    return KEY if most else np.dtype(np.uint32)


def touched_rows(form: RowForm, ids: np.ndarray) -> np.ndarray:
    """Return the row numbers `[B, F]` of the ids of a batch.

    Args:
      ids: int32 `[B, F]`, or the two 32-bit words of each 64-bit id, int32 `[B, F, 2]`.
    """
    if ids.ndim == 3:
        ids = np.ascontiguousarray(ids).view(np.uint64)[..., 0]
    return field_rows(form, np.arange(ids.shape[1]), ids)


def field_rows(form: RowForm, fields: int | np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the row number of each id, given the index of the id's field."""
    if not form.most:
        return (ids.astype(np.int64) + form.offsets[fields]).astype(np.uint32)
    found = np.empty(ids.shape, KEY)
    found["field"], found["id"] = fields, ids
    return found


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return unique rows, ascending, and the index of each given row among them."""
    if rows.dtype.names is None:
        return np.unique(rows, return_inverse=True)
    order = np.lexsort((rows["id"], rows["field"]))
    ordered = rows[order]
    first = np.ones(len(rows), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    places = np.empty(len(rows), np.int64)
    places[order] = np.cumsum(first) - 1
    return ordered[first], places


def hashes(rows: np.ndarray) -> np.ndarray:
    """Return a hash (uint64) of each key."""
    return mix(rows["id"] ^ mix(rows["field"].astype(np.uint64) + np.uint64(1)))


def sets_of(rows: np.ndarray, most: int) -> np.ndarray:
    """Return the number (int64) of each key's set.

    The set does not depend on the number of servers.

    Args:
      rows: the keys of the rows.
      most: the largest number of rows that all servers together keep.
    """
    return sets_of_hashes(hashes(rows), most)


def sets_of_hashes(hashed: np.ndarray, most: int) -> np.ndarray:
    """Return the number (int64) of the set of each key, given the hashes of the keys.

    Args:
      hashed: the hashes of the keys.
      most: the largest number of rows that all servers together keep.
    """
    count = np.uint64(max(1, most // WAYS))
    return ((hashed >> np.uint64(32)) % count).astype(np.int64)


def servers_of(rows: np.ndarray, servers: int, most: int = 0) -> np.ndarray:
    """Return the number of the server of each row; neighboring rows have different servers.

    Args:
      rows: the row numbers or keys.
      servers: the number of servers.
      most: the largest number of rows that all servers together keep, or 0 if they keep all rows.
    """
    return sets_of(rows, most) % servers if most else rows % np.uint32(servers)


def initial_rows(form: RowForm, seed: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the initial values of rows, float32 `[N, D]`.

    If the config gives the size of the table, the values equal the initial values of a run on a
    mesh.
    """
    if rows.dtype.names is None:
        return form.initial(seed, rows)
    sizes = np.array([*form.fields.values()])
    offsets = form.offsets.astype(np.uint64)
    found = form.initial(seed, (offsets[rows["field"]] + rows["id"]).astype(np.uint32))
    free = sizes[rows["field"]] == 0
    if free.any():
        columns = np.arange(form.width, dtype=np.uint64)
        keys = mix(hashes(rows[free]) ^ mix(seed.astype(np.uint64).reshape(1)))
        bits = mix(keys[:, None] + columns[None, :]) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - 1
        found[free] = unit * np.float32(form.scale) * (columns < form.width - form.zeros)
    return found


def rows_problem(form: RowForm, rows: Any) -> str | None:
    """Return why some of the rows cannot exist in the tables, or None if all of them can."""
    if not len(rows):
        return None
    if not form.most:
        if int(rows.max()) < form.rows:
            return None
        return (
            f"row {rows.max()} does not exist: the tables have {form.rows} rows: correct the "
            "ids in the data"
        )
    names, sizes = [*form.fields], np.array([*form.fields.values()], np.uint64)
    if int(rows["field"].max()) >= len(names):
        return (
            f"field {rows['field'].max()} does not exist: the tables are {', '.join(names)}: "
            "correct the data"
        )
    limits = sizes[rows["field"]]
    wrong = (limits > 0) & (rows["id"] >= limits)
    if not wrong.any():
        return None
    field, number = rows[wrong][0]
    return (
        f"row {number} of {names[field]} does not exist: the table has {sizes[field]} rows: "
        "correct the ids in the data"
    )
