"""The arrangement of chunks by stage, and of layers by chunk, in arrays.

An array has the same number of entries for all stages, and for all chunks. A stage with fewer
chunks, or a chunk with fewer layers, has entries that no task uses.
"""

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
    """Return the indices of the chunks in the order by stage: the chunks of stage 0, 1, ...

    If a stage has fewer chunks than another stage, its last entries are -1.

    Args:
      placement: the stage of each chunk.

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
    """Rearrange leaves from `[chunks, ...]` to `[entries, ...]`, in the order of `on_stages`.

    The first dim of the result can be split over the stage axis. An entry without a chunk repeats
    the first chunk, and no task uses it.
    """
    return _ordered(chunks, [max(chunk, 0) for chunk in on_stages(placement)])


def from_stages(places: Any, placement: Sequence[int]) -> PyTree:
    """Rearrange leaves from `[entries, ...]` to `[chunks, ...]`: the inverse of `to_stages`."""
    order = on_stages(placement)
    return _ordered(places, [order.index(chunk) for chunk in range(len(placement))])


def _ordered(tree: PyTree, order: Sequence[int]) -> PyTree:
    """Select the entries `order` of leaves `[n, ...]` by slices, and return `[len(order), ...]`.

    Indexing by an array would crash XLA's partitioner if data and tensor axes split the leaf too.
    """
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf[i : i + 1] for i in order]), tree)


@dataclass(frozen=True)
class Cut:
    """The division of a model's layers into chunks.

    Arrays have the same number of entries for every chunk: the number of layers of the largest
    chunk. A smaller chunk repeats its last layer.

    Attributes:
      layers: the number of layers of each chunk.

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
        """Whether all chunks have the same number of layers."""
        return len({*self.layers}) == 1

    @property
    def index(self) -> np.ndarray:
        """The index of the layer in each entry of each chunk, int `[chunks, most]`.

        >>> Cut((2, 1)).index.tolist()
        [[0, 1], [2, 2]]
        """
        ends = np.cumsum(self.layers)[:, None]
        starts = ends - np.array(self.layers)[:, None]
        return np.minimum(starts + np.arange(self.most), ends - 1)

    def to_chunks(self, layers: PyTree) -> PyTree:
        """Rearrange leaves from `[layers, ...]` to `[chunks, most, ...]`, by `index`."""
        index = self.index

        def leaf(x: jax.Array) -> jax.Array:
            assert len(x) == sum(self.layers), (x.shape, self.layers)
            return x.reshape(*index.shape, *x.shape[1:]) if self.even else x[index]

        return jax.tree.map(leaf, layers)

    def from_chunks(self, chunks: PyTree) -> PyTree:
        """Rearrange leaves from `[chunks, most, ...]` to `[layers, ...]`: invert `to_chunks`."""
        counts = np.array(self.layers)[:, None]
        places = np.flatnonzero(np.arange(self.most) < counts)

        def leaf(x: jax.Array) -> jax.Array:
            flat = x.reshape(-1, *x.shape[2:])
            return flat if self.even else flat[places]

        return jax.tree.map(leaf, chunks)

    def scan(
        self, layer: Callable[[Any, Any], Any], params: Params, x: PyTree, chunk: jax.Array
    ) -> PyTree:
        """Apply the layers of a chunk to `x` in sequence, and return the output of the last layer.

        In a chunk that has fewer layers than the largest chunk, the last iterations of the loop
        compute nothing.

        Args:
          layer: the function from (parameters of a layer, x) to the next x.
          params: the parameters of the chunk's layers, leaves `[most, ...]`.
          x: the input of the chunk.
          chunk: the index of the chunk, an int32 scalar.
        """
        if self.even:
            return lax.scan(lambda x, own: (layer(own, x), None), x, params)[0]
        count = jnp.asarray(self.layers)[chunk]

        def body(x: PyTree, own: tuple[jax.Array, Any]) -> tuple[Any, None]:
            place, weights = own
            with tick_scope(LAYER):
                # The layers from `count` on only pad the stack of a smaller chunk, and do not run.
                return lax.cond(place < count, lambda: layer(weights, x), lambda: x), None

        return lax.scan(body, x, (jnp.arange(self.most), params))[0]
