"""Updates of shards in pieces of a common shape, with the same code on every device count.

XLA:CPU decides for each loop whether to contract a product and a sum into a single rounding, and
may decide differently for a loop over a shard of another length. Shards are therefore updated in
pieces whose shape is the same for all device counts, a piece in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.strict.tree import settled, turns
from jaxdist.types import PyTree

Places = Sequence[int | None]
"""The dim along which each leaf is cut, or None for a leaf that all pieces share."""


def in_pieces(
    function: Callable[..., tuple[Any, ...]],
    count: int,
    trees: Sequence[PyTree],
    places: Sequence[Places],
    rest: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Apply `function` to trees in `count` equal pieces, one after another.

    Args:
      function: elementwise function of the trees and of `rest`; the n trees that it returns replace
        the last n of `trees`.
      trees: this device's trees.
      places: the dims along which the leaves of each tree are cut.
    """

    def run(number: jax.Array) -> tuple[Any, ...]:
        cut = [_map(_cut(number, count), *pair) for pair in zip(trees, places, strict=True)]
        pieces, more = settled((cut, rest))
        return settled(function(*pieces, *more))

    shapes = jax.eval_shape(run, jnp.int32(0))
    mine = places[len(places) - len(shapes) :]

    def turn(number: jax.Array, done: tuple[Any, ...]) -> tuple[Any, ...]:
        found = run(number)
        return tuple(_map(_put(number), *of) for of in zip(done, mine, found, strict=True))

    begun = tuple(_map(_room(count), *pair) for pair in zip(shapes, mine, strict=True))
    return turns(count, turn, begun)


def once(
    function: Callable[..., tuple[Any, ...]],
    trees: Sequence[PyTree],
    rest: tuple[Any, ...],
    *,
    flat: bool = True,
) -> tuple[Any, ...]:
    """Apply `function` to trees, compiled separately from the code around it.

    Args:
      function: function of the trees and of `rest`; the n trees that it returns replace the last n
        of `trees`.
      flat: as for `settled`.
    """
    shapes = jax.eval_shape(function, *trees, *rest)
    others, last = trees[: len(trees) - len(shapes)], trees[len(trees) - len(shapes) :]

    # XLA does not inline a loop whose number of iterations it does not know: see `turns`.
    def turn(_: jax.Array, last: tuple[Any, ...]) -> tuple[Any, ...]:
        given, mine, more = settled((others, last, rest), flat=flat)
        return settled(function(*given, *mine, *more), flat=flat)

    return turns(1, turn, tuple(last))


def _map(function: Callable[..., Any], tree: PyTree, places: Places, *more: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    rest = [jax.tree.leaves(other) for other in more]
    return structure.unflatten([function(*of) for of in zip(leaves, places, *rest, strict=True)])


def _cut(number: jax.Array, count: int) -> Callable[[jax.Array, int | None], jax.Array]:
    def cut(leaf: jax.Array, place: int | None) -> jax.Array:
        if place is None:
            return leaf
        size = leaf.shape[place] // count
        return lax.dynamic_slice_in_dim(leaf, number * size, size, place)

    return cut


def _put(number: jax.Array) -> Callable[[jax.Array, int | None, jax.Array], jax.Array]:
    def put(done: jax.Array, place: int | None, piece: jax.Array) -> jax.Array:
        if place is None:
            return piece
        return lax.dynamic_update_slice_in_dim(done, piece, number * piece.shape[place], place)

    return put


def _room(count: int) -> Callable[[jax.ShapeDtypeStruct, int | None], jax.Array]:
    def room(piece: jax.ShapeDtypeStruct, place: int | None) -> jax.Array:
        shape = list(piece.shape)
        if place is not None:
            shape[place] *= count
        return jnp.zeros(shape, piece.dtype)

    return room
