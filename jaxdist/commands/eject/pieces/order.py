"""Data: a new order of the examples in each epoch, which is computed without a stored table."""

import math
from typing import Any

import numpy as np

SEED = 0  # seed of the order and of the initial parameters
BATCH = 64  # examples per step, over all devices


def mix(x: Any) -> Any:
    """Permute uint64 numbers pseudo-randomly, by the finalizer of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def batch_of(data: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Return the examples of a step, in an order of the epoch that a Feistel network computes."""
    length = len(next(iter(data.values())))
    place = np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.uint64)
    epoch, row = np.divmod(place, np.uint64(length))
    key = mix(epoch ^ np.random.SeedSequence(SEED).generate_state(1, np.uint64))
    side = np.uint64(math.isqrt(length - 1) + 1)
    out = np.ones(BATCH, bool)
    while out.any():  # numbers >= length are permuted again, so that the order stays a permutation
        left, right = np.divmod(row[out], side)
        for turn in range(8):
            noise = mix(right ^ mix(key[out] + np.uint64(turn))) % side
            left, right = right, (left + noise) % side
        row[out] = left * side + right
        out = row >= length
    return {name: values[row.astype(np.int64)] for name, values in data.items()}
