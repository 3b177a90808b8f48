"""Calls of collectives on stacked layers, a few layers at a time.

A collective on a stack of all layers needs a second buffer as large as the stack. A collective on a
few layers at a time can write its results into an existing buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax import lax

from jaxdist.trees import change_some, leaf_bytes

Layers = list[jax.Array]
"""A list of tensors: the same few layers of several stacks, or tensors that are not stacked."""
Function = Callable[[list[int], Layers], Layers]
"""A function of the positions of some leaves and of these leaves. The function returns new leaves,
which have as many layers as the given leaves."""


def by_layers(
    function: Function,
    leaves: Sequence[jax.Array],
    layers: Sequence[int | None],
    chunk_bytes: int,
    *,
    into: Sequence[jax.Array] | None = None,
) -> Layers:
    """Call `function` on stacks of layers in chunks, and once on all other leaves together.

    Stacks with the same number of layers are passed together. If all layers of these stacks fit in
    one chunk, the stacks are passed together with the leaves that are not stacks.

    Args:
      function: the function to call on leaves, or on a chunk of layers of leaves.
      leaves: all leaves.
      layers: the number of layers that each leaf has along its first dim, or None for a leaf that
        is not a stack.
      chunk_bytes: the maximum number of bytes of a chunk, unless a single layer is larger.
      into: the buffers for the results, one for each leaf, or None to overwrite the stacks. The
        results of stacks get the dtypes of these buffers, and may be shorter than the buffers along
        any dim except the first.

    Returns:
      The results of `function` for all leaves, in the order of `leaves`.
    """
    found = list(leaves)
    once = [i for i, count in enumerate(layers) if count is None]
    for mine in group(layers):
        held = [leaves[i] for i in mine]
        filled = None if into is None else [into[i] for i in mine]
        count = min(layers_at_once(stacks, chunk_bytes) for stacks in (held, filled or held))
        if count == held[0].shape[0]:
            once += mine
        else:
            in_chunks = partial(_in_chunks, partial(function, mine), filled, count)
            found = change_some(in_chunks, found, mine)
    # A stack with a single chunk is passed together with the leaves that are not stacks, so that
    # `function` can send all of these in one message.
    once.sort()
    return change_some(partial(function, once), found, once)


def group(layers: Sequence[int | None]) -> list[list[int]]:
    """Group the indices of stacks that have the same number of layers.

    Args:
      layers: the number of layers of each leaf, or None for a leaf that is not a stack.

    >>> group([2, None, 3, 2])
    [[0, 3], [2]]
    """
    found: dict[int, list[int]] = {}
    for i, count in enumerate(layers):
        if count is not None:
            found.setdefault(count, []).append(i)
    return list(found.values())


def layers_at_once(stacks: Sequence[jax.Array], chunk_bytes: int) -> int:
    """Return the number of layers in each chunk of several stacks.

    The number divides the number of layers of the stacks, which have equally many layers. The
    number is the largest divisor for which the layers of a chunk have at most `chunk_bytes` over
    all stacks. If even a single layer is larger, the number is 1.

    >>> import numpy as np
    >>> layers_at_once([np.zeros((6, 4), "float32")], 63)
    3
    """
    layers = stacks[0].shape[0]
    layer_bytes = sum(leaf_bytes(stack) for stack in stacks) / layers
    fitting = [
        # Only divisors are possible: all iterations of the loop over chunks must have equal shapes.
        n
        for n in range(1, layers + 1)
        if layers % n == 0 and n * layer_bytes <= chunk_bytes
    ]
    return max(fitting, default=1)


def _in_chunks(
    function: Callable[[Layers], Layers], into: Layers | None, count: int, stacks: Layers
) -> Layers:
    """Call `function` on chunks of `count` layers, in sequence, and return whole stacks.

    The results overwrite the buffers `into`, or `stacks` if `into` is None.
    """
    chunks = stacks[0].shape[0] // count

    # `jaxdist.proofs` recognizes by this function's name that the loop overwrites its whole buffer.
    def overwrite_chunk(at: jax.Array, filled: Layers) -> Layers:
        layers = function(_take(filled if into is None else stacks, at * count, count))
        return _put(filled, layers, at * count)

    filled = lax.fori_loop(0, chunks, overwrite_chunk, stacks if into is None else into)
    # The results may be shorter than their buffers. A trace of the function gives their lengths.
    shapes = jax.eval_shape(function, stacks)
    return [lax.slice(f, [0] * f.ndim, s.shape) for f, s in zip(filled, shapes, strict=True)]


def _take(stacks: Layers, start: jax.Array, count: int) -> Layers:
    return [lax.dynamic_slice_in_dim(stack, start, count) for stack in stacks]


def _put(stacks: Layers, layers: Layers, start: jax.Array) -> Layers:
    return [
        lax.dynamic_update_slice_in_dim(stack, new, start, 0)
        for stack, new in zip(stacks, layers, strict=True)
    ]
