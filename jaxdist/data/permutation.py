"""A random permutation of any length, which is computed for each position instead of stored."""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 8


def permuted_examples(positions: np.ndarray, *, length: int, seed: int) -> np.ndarray:
    """Return the examples at `positions` of an endless, shuffled sequence of `length` examples.

    Position p is in epoch p // length. Every epoch has each example once, in a different order. A
    generalized Feistel network over Z_a x Z_a with a = ceil(sqrt(length)) is a bijection on a**2 >=
    length numbers. If a result is too large, the network is applied to it again until it is in
    range (cycle walking), which preserves the bijection. The cost is O(1) memory and about 20
    vector operations.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", section 4 and 5 (2002).

    Args:
      positions: the positions, int64 [N], each >= 0.
      length: the number of examples in an epoch, 1 to 2**62.
      seed: the seed of the order, any integer >= 0.

    >>> permuted_examples(np.arange(6), length=3, seed=0).tolist()
    [2, 1, 0, 0, 1, 2]
    """
    epochs, inside = np.divmod(positions.astype(np.uint64), np.uint64(length))
    keys = mix(epochs ^ key_of(seed))
    # The root is computed with integers alone: the square of `side` must not be below `length`, and
    # for large lengths the square root of a float is not exact.
    side = np.uint64(math.isqrt(length - 1) + 1)
    result = _feistel(inside, keys, side)
    while (outside := result >= length).any():
        result[outside] = _feistel(result[outside], keys[outside], side)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, side: np.uint64) -> np.ndarray:
    left, right = np.divmod(values, side)
    for number in range(_ROUNDS):
        # The noise is reduced before it is added, because a sum that wraps at 2**64 is not a
        # bijection.
        noise = mix(right ^ mix(keys + np.uint64(number))) % side
        left, right = right, (left + noise) % side
    return left * side + right


def key_of(*seeds: int) -> np.uint64:
    """Return a key that depends on all seeds; similar seeds give unrelated keys."""
    return np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]


def mix(values: np.ndarray) -> np.ndarray:
    """Return a hash of each uint64, by the finalizer of splitmix64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
