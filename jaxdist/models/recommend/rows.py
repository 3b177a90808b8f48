"""The initial rows of tables, computed from (seed, row) alone.

A table on a mesh and a row that a server creates on first use hold the same bits, so the arithmetic
is of 32-bit integers and one rounding, which numpy and XLA do alike.
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
"""The number of rows of all tables together is a multiple of this, so that rows divide over most
meshes; the rows that fill it up have no id."""
MOST_ROWS = 2**31 - MULTIPLE
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True)
class RowForm:
    """The form of a model's tables, which are stored as one: the rows of a field follow another's.

    Attributes:
      fields: number of rows of each field's table, by the field's name.
      width: number of values in a row.
      scale: initial values are uniform in [-scale, scale).
      zeros: number of last values of a row that begin at zero.
    """

    fields: Mapping[str, int]
    width: int
    scale: float
    zeros: int = 0

    @property
    def offsets(self) -> np.ndarray:
        """The row (int32) at which each field's table begins."""
        return np.array([0, *accumulate(self.fields.values())][:-1], np.int32)

    @property
    def rows(self) -> int:
        """The number of rows of all tables, filled up to a multiple of `MULTIPLE`."""
        return -(-sum(self.fields.values()) // MULTIPLE) * MULTIPLE

    def initial(self, seed: jax.Array | np.ndarray, rows: Any, xp: Any = np) -> Any:
        """Return the initial values, float32 `[N, width]`, of rows (uint32 `[N]`).

        Args:
          seed: uint32 scalar.
          xp: numpy or jax.numpy; both return the same bits.
        """
        columns = xp.arange(self.width, dtype=xp.uint32) * xp.asarray(_GOLDEN, xp.uint32)
        keys = _scattered(rows.astype(xp.uint32) ^ xp.asarray(seed, xp.uint32), xp)
        bits = _scattered(keys[:, None] + columns[None, :], xp)
        # 24 bits fit a float32 exactly, and so does their double minus one.
        unit = (bits >> 8).astype(xp.float32) * xp.asarray(2.0**-23, xp.float32) - 1
        found = unit * xp.asarray(self.scale, xp.float32)
        live = np.arange(self.width) < self.width - self.zeros
        return found * xp.asarray(live[None, :], xp.float32)


def _scattered(x: Any, xp: Any) -> Any:
    """Scatter each uint32 by the finaliser of MurmurHash3 (Appleby), which wraps around."""
    x = (x ^ (x >> 16)) * xp.asarray(_FIRST, xp.uint32)
    x = (x ^ (x >> 13)) * xp.asarray(_SECOND, xp.uint32)
    return x ^ (x >> 16)


def seed_of(key: jax.Array) -> jax.Array:
    """Return the seed (uint32 scalar) of a model's rows from the first key that the model draws."""
    return jax.random.bits(key, (), jnp.uint32)
