"""The arrangement of layers and chunks in arrays: by stage, and padded if counts are uneven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.parallel.pipeline.executor.branches import LAYER, tick_scope
from jaxdist.types import Params, PyTree


def on_stages(placement: Sequence[int]) -> tuple[int, ...]:
    """Return the chunk at each place of an array with all stages' chunks, stage after stage.

    If a stage has fewer chunks than another stage, its last places have -1.

    >>> on_stages((0, 1, 2, 2, 1, 0))
    (0, 5, 1, 4, 2, 3)
    >>> on_stages((0, 1, 1))
    (0, -1, 1, 2)
    """
    stages = range(max(placement) + 1)
    each = [[c for c, stage in enumerate(placement) if stage == at] for at in stages]
    most = max(map(len, each))
    return tuple(chunk for own in each for chunk in (*own, *(-1,) * (most - len(own))))


def to_stages(chunks: PyTree, placement: Sequence[int]) -> PyTree:
    """Rearrange leaves `[chunks, ...]` to `[places, ...]`, to be split over the stage axis.

    Places without a chunk repeat the first chunk; no task uses these places.
    """
    return _ordered(chunks, [max(chunk, 0) for chunk in on_stages(placement)])


def from_stages(places: Any, placement: Sequence[int]) -> PyTree:
    """Rearrange leaves `[places, ...]` to `[chunks, ...]`: the inverse of `to_stages`."""
    order = on_stages(placement)
    return _ordered(places, [order.index(chunk) for chunk in range(len(placement))])


def _ordered(tree: PyTree, order: Sequence[int]) -> PyTree:
    """Reorder leaves `[n, ...]` to `[len(order), ...]` by slices.

    A lookup by an array of indices would crash XLA's partitioner if data and tensor axes split the
    leaf too.
    """
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf[i : i + 1] for i in order]), tree)


@dataclass(frozen=True)
class Cut:
    """The number of layers of each chunk.

    In arrays, each chunk has as many places for layers as the largest chunk.

    >>> Cut((2, 1)).to_chunks(jnp.arange(3) + 1).tolist()
    [[1, 2], [3, 3]]
    """

    layers: tuple[int, ...]

    @property
    def most(self) -> int:
        """The number of layers of the largest chunk."""
        return max(self.layers)

    @property
    def even(self) -> bool:
        """Whether all chunks have equally many layers."""
        return len({*self.layers}) == 1

    @property
    def index(self) -> np.ndarray:
        """The layer at each place, int `[chunks, most]`; a smaller chunk repeats its last layer.

        >>> Cut((2, 1)).index.tolist()
        [[0, 1], [2, 2]]
        """
        ends = np.cumsum(self.layers)[:, None]
        starts = ends - np.array(self.layers)[:, None]
        return np.minimum(starts + np.arange(self.most), ends - 1)

    def to_chunks(self, layers: PyTree) -> PyTree:
        """Rearrange leaves `[layers, ...]` to `[chunks, most, ...]`, by `index`."""
        index = self.index

        def leaf(x: jax.Array) -> jax.Array:
            assert len(x) == sum(self.layers), (x.shape, self.layers)
            return x.reshape(*index.shape, *x.shape[1:]) if self.even else x[index]

        return jax.tree.map(leaf, layers)

    def from_chunks(self, chunks: PyTree) -> PyTree:
        """Rearrange leaves `[chunks, most, ...]` to `[layers, ...]`, without the padded places."""
        counts = np.array(self.layers)[:, None]
        places = np.flatnonzero(np.arange(self.most) < counts)

        def leaf(x: jax.Array) -> jax.Array:
            flat = x.reshape(-1, *x.shape[2:])
            return flat if self.even else flat[places]

        return jax.tree.map(leaf, chunks)

    def scan(
        self, layer: Callable[[Any, Any], Any], params: Params, x: PyTree, chunk: jax.Array
    ) -> PyTree:
        """Apply the layers of a chunk to x, one after another; places without a layer cost nothing.

        Args:
          layer: function from (parameters of a layer, x) to the next x.
          params: parameters of the chunk's layers, leaves `[most, ...]`.
          chunk: index of the chunk, int32 scalar.
        """
        if self.even:
            return lax.scan(lambda x, own: (layer(own, x), None), x, params)[0]
        count = jnp.asarray(self.layers)[chunk]

        def body(x: PyTree, own: tuple[jax.Array, Any]) -> tuple[Any, None]:
            place, weights = own
            with tick_scope(LAYER):
                return lax.cond(place < count, lambda: layer(weights, x), lambda: x), None

        return lax.scan(body, x, (jnp.arange(self.most), params))[0]
