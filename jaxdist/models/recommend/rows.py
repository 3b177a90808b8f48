"""The initial rows of tables, computed from (seed, row) alone.

A row has the same bits whether a mesh holds the table or a server creates the row on first use. The
arithmetic therefore uses only 32-bit integers and a single rounding, for which numpy and XLA have
the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLE = 256
"""The number by which the total number of rows is divisible, so that rows divide over most meshes.
The rows of the padding have no id."""
MOST_ROWS = 2**31 - MULTIPLE
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True)
class RowForm:
    """The form of a model's tables, which are stored as one table, field after field.

    Attributes:
      fields: the number of rows of each field's table, by the field's name; 0 if the table has a
        row for each 64-bit id.
      width: the number of values in a row.
      scale: the bound of the initial values, which are uniform in [-scale, scale).
      zeros: the number of values at the end of a row that begin at zero.
      most: the number of rows that servers keep, or 0 if they keep all rows.
    """

    fields: Mapping[str, int]
    width: int
    scale: float
    zeros: int = 0
    most: int = 0

    @property
    def offsets(self) -> np.ndarray:
        """The index (int32) of the first row of each field's table."""
        return np.array([0, *accumulate(self.fields.values())][:-1], np.int32)

    @property
    def rows(self) -> int:
        """The number of rows of all tables, rounded up to a multiple of `MULTIPLE`."""
        return -(-sum(self.fields.values()) // MULTIPLE) * MULTIPLE

    def initial(self, seed: jax.Array | np.ndarray, rows: Any, xp: Any = np) -> Any:
        """Return the initial values of rows, float32 `[N, width]`.

        Args:
          seed: the seed, a uint32 scalar.
          rows: the indices of the rows, uint32 `[N]`.
          xp: the module that computes, numpy or jax.numpy; both return the same bits.
        """
        columns = xp.arange(self.width, dtype=xp.uint32) * xp.asarray(_GOLDEN, xp.uint32)
        keys = _scattered(rows.astype(xp.uint32) ^ xp.asarray(seed, xp.uint32), xp)
        bits = _scattered(keys[:, None] + columns[None, :], xp)
        # A float32 represents every integer below 2^24 exactly, and the same is true of this
        # integer times 2^-23, minus 1.
        unit = (bits >> 8).astype(xp.float32) * xp.asarray(2.0**-23, xp.float32) - 1
        found = unit * xp.asarray(self.scale, xp.float32)
        live = np.arange(self.width) < self.width - self.zeros
        return found * xp.asarray(live[None, :], xp.float32)


def _scattered(x: Any, xp: Any) -> Any:
    """Return a hash of each uint32, by the finalizer of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * xp.asarray(_FIRST, xp.uint32)
    x = (x ^ (x >> 13)) * xp.asarray(_SECOND, xp.uint32)
    return x ^ (x >> 16)


def seed_of(key: jax.Array) -> jax.Array:
    """Return the seed (uint32 scalar) of a model's rows from the first key that the model draws."""
    return jax.random.bits(key, (), jnp.uint32)
