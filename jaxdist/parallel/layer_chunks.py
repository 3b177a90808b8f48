"""Collectives over stacked layers, a few layers at a time, without a second copy of the stack.

A collective on a stack of all layers needs a second buffer as large as the stack before the first
is free. A few layers at a time, results go into an existing buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax import lax

from jaxdist.trees import leaf_bytes

Layers = list[jax.Array]
"""The same few layers of several stacks, or tensors that are not stacked."""
Function = Callable[[list[int], Layers], Layers]
"""Function of the positions of some leaves among all, and the leaves; it keeps the number of
layers."""


def by_layers(
    function: Function,
    leaves: Sequence[jax.Array],
    layers: Sequence[int | None],
    chunk_bytes: int,
    *,
    into: Sequence[jax.Array] | None = None,
) -> Layers:
    """Call `function` on all leaves: on stacks in chunks of layers, on the rest at once.

    A stack whose layers all fit in one chunk belongs to the rest.

    Args:
      layers: how many layers each leaf has along its first dim; None is not a stack.
      chunk_bytes: bytes of a chunk's layers, unless a single layer is larger.
      into: buffers of the stacks' results; None overwrites the stacks themselves. Results take the
        dtypes of these buffers, and may be shorter along any dim but the first.
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
            _replace(found, mine, _in_chunks(partial(function, mine), held, filled, count))
    # A stack with a single chunk joins the leaves without layers, so that all can be one message.
    once.sort()
    _replace(found, once, function(once, [leaves[i] for i in once]))
    return found


def group(layers: Sequence[int | None]) -> list[list[int]]:
    """Group the positions of stacks with equally many layers.

    >>> group([2, None, 3, 2])
    [[0, 3], [2]]
    """
    found: dict[int, list[int]] = {}
    for i, count in enumerate(layers):
        if count is not None:
            found.setdefault(count, []).append(i)
    return list(found.values())


def layers_at_once(stacks: Sequence[jax.Array], chunk_bytes: int) -> int:
    """Return how many layers of all stacks fit in `chunk_bytes`, as a divisor of their number.

    >>> import numpy as np
    >>> layers_at_once([np.zeros((6, 4), "float32")], 63)
    3
    """
    layers = stacks[0].shape[0]
    layer_bytes = sum(leaf_bytes(stack) for stack in stacks) / layers
    fitting = [
        # Only divisors: all iterations of the loop over chunks must have equal shapes.
        n
        for n in range(1, layers + 1)
        if layers % n == 0 and n * layer_bytes <= chunk_bytes
    ]
    return max(fitting, default=1)


def _in_chunks(
    function: Callable[[Layers], Layers], stacks: Layers, into: Layers | None, count: int
) -> Layers:
    """Call it on chunks of `count` layers."""
    chunks = stacks[0].shape[0] // count

    # `jaxdist.proofs` knows by this name that the loop leaves nothing of what it fills.
    def overwrite_chunk(at: jax.Array, filled: Layers) -> Layers:
        layers = function(_take(filled if into is None else stacks, at * count, count))
        return _put(filled, layers, at * count)

    filled = lax.fori_loop(0, chunks, overwrite_chunk, stacks if into is None else into)
    # The results may be shorter than their buffers; the function's own shapes give their lengths.
    shapes = jax.eval_shape(function, stacks)
    return [lax.slice(f, [0] * f.ndim, s.shape) for f, s in zip(filled, shapes, strict=True)]


def _replace(leaves: Layers, positions: list[int], new: Layers) -> None:
    for i, leaf in zip(positions, new, strict=True):
        leaves[i] = leaf


def _take(stacks: Layers, start: jax.Array, count: int) -> Layers:
    return [lax.dynamic_slice_in_dim(stack, start, count) for stack in stacks]


def _put(stacks: Layers, layers: Layers, start: jax.Array) -> Layers:
    return [
        lax.dynamic_update_slice_in_dim(stack, new, start, 0)
        for stack, new in zip(stacks, layers, strict=True)
    ]
