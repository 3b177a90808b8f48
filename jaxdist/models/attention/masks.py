"""The masks of splash attention, which are cheap to build for long sequences.

The masks of jax compute every element, which takes minutes for 131,072 positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash


@dataclass(frozen=True)
class Near:
    """The rule that a query sees the keys up to a distance before and after it.

    Attributes:
      behind: the number of earlier positions that a query sees, or None for all of them.
      ahead: the number of later positions that a query sees, or None for all of them.
    """

    behind: int | None
    ahead: int | None

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Return whether each query sees each key, given the positions of queries and of keys."""
        distance = queries - keys
        if self.behind is None:
            return distance >= -(self.ahead or 0)
        if self.ahead is None:
            return distance <= self.behind
        return (distance <= self.behind) & (distance >= -self.ahead)

    def whole_block(self, least: int, most: int) -> bool | None:
        """Return True if all pairs of a block are visible, False if none is, and otherwise None.

        Args:
          least, most: the smallest and the largest distance from a key to a query.
        """
        behind = most if self.behind is None else self.behind
        ahead = -least if self.ahead is None else self.ahead
        if most <= behind and least >= -ahead:
            return True
        return False if least > behind or most < -ahead else None


class NearMask(splash.Mask):
    """The mask of a rule, for queries in any order and keys in the order of the sequence."""

    def __init__(self, rule: Near, positions: np.ndarray) -> None:
        """Build the mask of queries at these positions, int32 `[L]`, to the keys 0 to L - 1."""
        self.mask_function = rule
        self.q_sequence = positions

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of queries and of keys."""
        return (len(self.q_sequence),) * 2

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Return a block of the mask, or a single element if all elements of the block are equal.

        Splash attention reads only whether any element is set, and whether all are.
        """
        queries, keys = self.q_sequence[block[0]], np.arange(block[1].start, block[1].stop)
        least, most = int(queries.min()) - block[1].stop + 1, int(queries.max()) - block[1].start
        whole = self.mask_function.whole_block(least, most)
        if whole is not None:
            return np.full((1, 1), whole)
        return self.mask_function(queries[:, None], keys[None, :])

    def __eq__(self, other: object) -> bool:
        """Return whether two masks have the same rule and positions, for jax's cache of masks."""
        return isinstance(other, NearMask) and self._key() == other._key()

    def __hash__(self) -> int:
        """Return a hash that is equal for equal masks."""
        return hash(self._key())

    def _key(self) -> tuple[Near, bytes]:
        return self.mask_function, self.q_sequence.tobytes()
