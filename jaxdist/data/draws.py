"""Random numbers for examples; each number is a function of the example's key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxdist.data.permutation import mix


@dataclass
class Draws:
    """The random numbers of N examples: each call draws a number from the stream of every key."""

    keys: np.ndarray
    count: int = 0

    def bits(self) -> np.ndarray:
        """Draw a uint64 from each stream, [N]."""
        self.count += 1
        return mix(self.keys ^ mix(np.full(1, self.count, np.uint64)))

    def integers(self, below: int) -> np.ndarray:
        """Draw an int64 in 0 to `below` - 1 from each stream, [N]."""
        return (self.bits() % np.uint64(below)).astype(np.int64)

    def uniform(self) -> np.ndarray:
        """Draw a float64 in [0, 1) from each stream, [N]."""
        # Only 53 bits are used. A float64 holds 53 bits, so no number is rounded up to 1.
        return (self.bits() >> np.uint64(11)) * 2.0**-53
