"""The definition of the results of collectives, as functions on the list of all devices' arrays.

In all functions, `blocks[i]` is the array of device i before the collective, and element i of the
result is the array of device i after the collective. The functions run in numpy, without devices.
`operations.py` is tested against these functions.

Operations that only move data (all_gather, broadcast, all_to_all) preserve all bits, for example
the sign of -0.0. A NaN on any device gives NaN in a sum, a max and a min. The algorithm decides the
sign of a sum that is zero, and whether the max or min of 0.0 and -0.0 is 0.0 or -0.0.

>>> all_reduce([np.array([1, 2]), np.array([3, 4])])
[array([4, 6]), array([4, 6])]
>>> reduce_scatter([np.array([1, 2, 3]), np.array([4, 5, 6])])
[array([5, 7]), array([9, 0])]
>>> all_gather([np.array([5, 7]), np.array([9, 0])], size=3)
[array([5, 7, 9]), array([5, 7, 9])]
>>> broadcast([np.array([1, 2]), np.array([3, 4])], root=1)
[array([3, 4]), array([3, 4])]
>>> reduce([np.array([1, 2]), np.array([3, 4])], root=1)
[array([0, 0]), array([4, 6])]
>>> all_to_all([np.array([1, 2]), np.array([3, 4])])
[array([1, 3]), array([2, 4])]
"""

from __future__ import annotations

import numpy as np

Blocks = list[np.ndarray]

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def _combined(blocks: Blocks, op: str = "sum") -> np.ndarray:
    """Combine all blocks element by element, in the dtype of the blocks."""
    # Without `dtype`, numpy would add narrow integers in its default integer type.
    total = COMBINE[op].reduce(np.stack(blocks), axis=0, dtype=blocks[0].dtype)
    return total / total.dtype.type(len(blocks)) if op == "mean" else total


def all_reduce(blocks: Blocks, op: str = "sum") -> Blocks:
    """Return the combination of all blocks for every device."""
    return [_combined(blocks, op) for _ in blocks]


def reduce_scatter(blocks: Blocks, op: str = "sum", dim: int = 0) -> Blocks:
    """Combine the blocks of all devices, and return a part of the result for each device.

    Device i gets part i. With N devices, a part has ceil(n / N) of the n elements along `dim`,
    padded with zeros.
    """
    total = np.moveaxis(_combined(blocks, op), dim, 0)
    width = -(-len(total) // len(blocks))
    padded = np.zeros((width * len(blocks), *total.shape[1:]), total.dtype)
    padded[: len(total)] = total
    return [np.moveaxis(part, 0, dim) for part in np.split(padded, len(blocks))]


def all_gather(blocks: Blocks, dim: int = 0, size: int | None = None) -> Blocks:
    """Return the concatenation of all blocks along `dim`, cut to `size`, for every device."""
    whole = np.concatenate(blocks, axis=dim)
    return [whole.take(range(whole.shape[dim])[:size], axis=dim) for _ in blocks]


def broadcast(blocks: Blocks, root: int = 0) -> Blocks:
    """Return the block of `root` for every device."""
    return [blocks[root] for _ in blocks]


def reduce(blocks: Blocks, root: int = 0, op: str = "sum") -> Blocks:
    """Return the combination of all blocks for device `root`, and zeros for the other devices."""
    total = _combined(blocks, op)
    return [total if i == root else np.zeros_like(total) for i in range(len(blocks))]


def all_to_all(blocks: Blocks, split_dim: int = 0, concat_dim: int = 0) -> Blocks:
    """Return, for each device i, the concatenation of part i of every block."""
    parts = [np.split(block, len(blocks), axis=split_dim) for block in blocks]
    return [
        np.concatenate([part[i] for part in parts], axis=concat_dim) for i in range(len(blocks))
    ]
