"""Where layers and chunks lie in arrays: on their stages, and padded where they are uneven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def on_stages(placement: Sequence[int]) -> tuple[int, ...]:
    """The chunk in each place when all stages' chunks stand in one array, stage after stage.

    Where a stage has fewer chunks than another, a place holds -1.

    >>> on_stages((0, 1, 2, 2, 1, 0))
    (0, 5, 1, 4, 2, 3)
    >>> on_stages((0, 1, 1))
    (0, -1, 1, 2)
    """
    stages = range(max(placement) + 1)
    each = [[c for c, stage in enumerate(placement) if stage == at] for at in stages]
    most = max(map(len, each))
    return tuple(chunk for own in each for chunk in (*own, *(-1,) * (most - len(own))))


def to_stages(chunks: Any, placement: Sequence[int]) -> Any:
    """Leaves `[chunks, ...]` as `[places, ...]`, to be split over the stage axis.

    Places that hold no chunk repeat one, which no task uses.
    """
    order = np.maximum(on_stages(placement), 0)
    return jax.tree.map(lambda leaf: leaf[order], chunks)


def from_stages(places: Any, placement: Sequence[int]) -> Any:
    """The inverse of `to_stages`."""
    order = on_stages(placement)
    back = np.array([order.index(chunk) for chunk in range(len(placement))])
    return jax.tree.map(lambda leaf: leaf[back], places)


@dataclass(frozen=True)
class Cut:
    """How many layers each chunk has, by chunk; arrays have as many for each as the largest.

    >>> Cut((2, 1)).to_chunks(jnp.arange(3) + 1).tolist()
    [[1, 2], [3, 0]]
    """

    layers: tuple[int, ...]

    @property
    def most(self) -> int:
        """Layers of the largest chunk."""
        return max(self.layers)

    def to_chunks(self, layers: Any) -> Any:
        """Leaves `[layers, ...]` as `[chunks, most, ...]`, zeros where a chunk has no layer."""
        ends = [*accumulate(self.layers)]

        def leaf(x: jax.Array) -> jax.Array:
            assert len(x) == ends[-1], (x.shape, self.layers)
            parts = (x[end - own : end] for own, end in zip(self.layers, ends, strict=True))
            return jnp.stack(
                [
                    jnp.pad(part, [(0, self.most - len(part)), *[(0, 0)] * (x.ndim - 1)])
                    for part in parts
                ]
            )

        return jax.tree.map(leaf, layers)

    def from_chunks(self, chunks: Any) -> Any:
        """The inverse of `to_chunks`."""
        return jax.tree.map(
            lambda x: jnp.concatenate([x[c, :own] for c, own in enumerate(self.layers)]), chunks
        )

    def scan(self, layer: Callable[[Any, Any], Any], params: Any, x: Any, chunk: jax.Array) -> Any:
        """x after the layers of a chunk; those that it has not cost nothing.

        Args:
          layer: (parameters of a layer, x) to the next x.
          params: leaves `[most, ...]`.
          chunk: int32 scalar.
        """
        if len(set(self.layers)) == 1:
            return lax.scan(lambda x, own: (layer(own, x), None), x, params)[0]
        count = jnp.asarray(self.layers)[chunk]

        def body(x: Any, own: tuple[jax.Array, Any]) -> tuple[Any, None]:
            place, weights = own
            return lax.cond(place < count, lambda: layer(weights, x), lambda: x), None

        return lax.scan(body, x, (jnp.arange(self.most), params))[0]
