"""Random numbers for examples, each a function of the example's key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxdist.data.permutation import mix


@dataclass
class Draws:
    """Random numbers of N examples, one stream for each key; each call takes the next number."""

    keys: np.ndarray
    count: int = 0

    def bits(self) -> np.ndarray:
        """Draw uint64 [N]."""
        self.count += 1
        return mix(self.keys ^ mix(np.full(1, self.count, np.uint64)))

    def integers(self, below: int) -> np.ndarray:
        """Draw int64 [N] in 0 to `below` - 1."""
        return (self.bits() % np.uint64(below)).astype(np.int64)

    def uniform(self) -> np.ndarray:
        """Draw float64 [N] in [0, 1)."""
        # A float64 has 53 bits, so that no number is rounded up to 1.
        return (self.bits() >> np.uint64(11)) * 2.0**-53
