"""The application of functions to a shard in pieces, with the same code on any number of devices.

XLA:CPU decides for each loop whether it rounds a product before it adds the product to a sum. XLA
may decide differently for a loop over a shard of another length. A shard is therefore divided into
pieces that have the same shape on any number of devices, and each iteration of a loop updates one
piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.strict.tree import settled, turns
from jaxdist.types import PyTree

Places = Sequence[int | None]
"""The dim along which each leaf is divided into pieces, or None for a leaf that is not divided.
Every iteration reads or writes all elements of an undivided leaf."""


def in_pieces(
    function: Callable[..., tuple[Any, ...]],
    count: int,
    trees: Sequence[PyTree],
    places: Sequence[Places],
    rest: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Apply an elementwise function to trees in `count` equal pieces, in sequence.

    Args:
      function: the elementwise function, which is called with a piece of each tree and then with
        `rest`. The n trees that it returns have the structures of the last n trees.
      count: the number of pieces.
      trees: the trees, with this device's shards.
      places: for each tree, the dims along which its leaves are divided.
      rest: the arguments of `function` after the pieces, which are the same for all pieces.

    Returns:
      The n trees that `function` returns, joined from the results for all pieces.
    """

    def run(number: jax.Array) -> tuple[Any, ...]:
        cut = [
            _map(partial(_cut, number, count), *pair) for pair in zip(trees, places, strict=True)
        ]
        pieces, more = settled((cut, rest))
        return settled(function(*pieces, *more))

    shapes = jax.eval_shape(run, jnp.int32(0))
    mine = places[len(places) - len(shapes) :]

    def turn(number: jax.Array, done: tuple[Any, ...]) -> tuple[Any, ...]:
        found = run(number)
        put = partial(_put, number)
        return tuple(_map(put, *of) for of in zip(done, mine, found, strict=True))

    begun = tuple(_map(partial(_room, count), *pair) for pair in zip(shapes, mine, strict=True))
    return turns(count, turn, begun)


def once(
    function: Callable[..., tuple[Any, ...]],
    trees: Sequence[PyTree],
    rest: tuple[Any, ...],
    *,
    flat: bool = True,
) -> tuple[Any, ...]:
    """Apply a function to trees, such that XLA compiles the function separately from other code.

    Args:
      function: the function, which is called with the trees and then with `rest`. The n trees that
        it returns have the structures and shapes of the last n trees.
      trees: the first arguments of `function`.
      rest: the arguments of `function` after the trees.
      flat: whether to flatten arrays before the barriers, as in `settled`.

    Returns:
      The n trees that `function` returns.
    """
    shapes = jax.eval_shape(function, *trees, *rest)
    others, last = trees[: len(trees) - len(shapes)], trees[len(trees) - len(shapes) :]

    # XLA does not inline a loop whose number of iterations it does not know (`turns`).
    def turn(_: jax.Array, last: tuple[Any, ...]) -> tuple[Any, ...]:
        given, mine, more = settled((others, last, rest), flat=flat)
        return settled(function(*given, *mine, *more), flat=flat)

    return turns(1, turn, tuple(last))


def _map(function: Callable[..., Any], tree: PyTree, places: Places, *more: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    rest = [jax.tree.leaves(other) for other in more]
    return structure.unflatten([function(*of) for of in zip(leaves, places, *rest, strict=True)])


def _cut(number: jax.Array, count: int, leaf: jax.Array, place: int | None) -> jax.Array:
    if place is None:
        return leaf
    size = leaf.shape[place] // count
    return lax.dynamic_slice_in_dim(leaf, number * size, size, place)


def _put(number: jax.Array, done: jax.Array, place: int | None, piece: jax.Array) -> jax.Array:
    if place is None:
        return piece
    return lax.dynamic_update_slice_in_dim(done, piece, number * piece.shape[place], place)


def _room(count: int, piece: jax.ShapeDtypeStruct, place: int | None) -> jax.Array:
    shape = [n * (count if dim == place else 1) for dim, n in enumerate(piece.shape)]
    return jnp.zeros(shape, piece.dtype)
