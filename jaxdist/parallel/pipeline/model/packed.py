"""Models whose chunks differ in shape: parameters as vectors, and activations as padded rows.

All stages run the same program on arrays of the same shapes. The parameters of a chunk are
therefore packed into a vector, which is padded to the length of the longest vector. An activation
`[rows, ...]` between chunks becomes `[rows, features]`, padded to the largest number of features.
A `lax.switch` selects the function of the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.bucket import pack, unpack
from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.executor.branches import CHUNK, tick_scope
from jaxdist.parallel.pipeline.executor.model_fns import ModelFns, Visit
from jaxdist.trees import tree_size
from jaxdist.types import PyTree

Chunk = Callable[[Any, jax.Array, Visit], jax.Array]
"""A function from (a chunk's parameters, x, visit) to the next x. Both x and the next x have the
shape `[rows, ...]`, where the other dims may differ."""


@dataclass(frozen=True)
class Packed:
    """A model whose chunks differ, in a form that can be converted to `ModelFns`.

    Attributes:
      embed: the function from (shared, visit) to the input of the first chunk.
      chunks: the function of each chunk.
      head: the function from (shared, output of the last chunk, visit) to (the scalar to minimize,
        sums).
      params: the shapes of the parameters of each chunk.
      boundaries: the shape of the input of each chunk, then of the output of the last chunk.
    """

    embed: Callable[[Any, Visit], jax.Array]
    chunks: tuple[Chunk, ...]
    head: Callable[[Any, jax.Array, Visit], tuple[jax.Array, Any]]
    params: tuple[Any, ...]
    boundaries: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def parts(self) -> ModelFns:
        """The model as `ModelFns`, in which the parameters of a chunk are a padded vector."""
        return ModelFns(
            lambda shared, visit: self._padded(self.embed(shared, visit)),
            self._blocks,
            lambda shared, x, visit: self.head(shared, self._cut(x, -1), visit),
        )

    @property
    def length(self) -> int:
        """The number of parameters of the largest chunk."""
        return max(map(tree_size, self.params))

    @property
    def features(self) -> int:
        """The number of elements in a row of the largest activation between chunks."""
        return max(math.prod(shape.shape[1:]) for shape in self.boundaries)

    def pack(self, params: Sequence[Any]) -> jax.Array:
        """Pack the parameters of all chunks into an array `[chunks, length]`."""
        return jnp.stack([self._vector(own) for own in params])

    def _vector(self, tree: PyTree) -> jax.Array:
        leaves, dtype = jax.tree.leaves(tree), jax.tree.leaves(self.params)[0].dtype
        whole = pack(leaves) if leaves else jnp.zeros(0, dtype)
        return jnp.pad(whole, (0, self.length - whole.size))

    def _tree(self, vector: jax.Array, chunk: int) -> PyTree:
        shapes, structure = jax.tree.flatten(self.params[chunk])
        return structure.unflatten(unpack(vector, shapes))

    def _padded(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(len(x), -1)
        return jnp.pad(rows, ((0, 0), (0, self.features - rows.shape[1])))

    def _cut(self, x: jax.Array, boundary: int) -> jax.Array:
        shape = self.boundaries[boundary].shape[1:]
        return x[:, : math.prod(shape)].reshape(len(x), *shape)

    def _blocks(self, vector: jax.Array, x: jax.Array, visit: Visit) -> jax.Array:
        def branch(chunk: int) -> Callable[[], jax.Array]:
            def taken() -> jax.Array:
                params = self._tree(vector, chunk)
                return self._padded(self.chunks[chunk](params, self._cut(x, chunk), visit))

            return taken

        with tick_scope(CHUNK):
            return lax.switch(visit.chunk, [branch(chunk) for chunk in range(len(self.chunks))])


def pack_model(
    embed: Callable[[Any, Visit], jax.Array],
    chunks: Sequence[Chunk],
    head: Callable[[Any, jax.Array, Visit], tuple[jax.Array, Any]],
    params: Sequence[Any],
    shared: PyTree,
    visit: Visit,
) -> Packed:
    """Build a `Packed` model from chunks that differ, and trace them to find all shapes.

    Args:
      embed: the function from (shared, visit) to the input of the first chunk.
      chunks: the function of each chunk.
      head: the function from (shared, output of the last chunk, visit) to (the scalar to minimize,
        sums).
      params: the parameters of each chunk, or their shapes.
      shared: the parameters of embedding and head, or their shapes.
      visit: a visit, or its shapes.

    Raises:
      ConfigError: the parameters do not all have the same dtype, or the activations between chunks
        do not all have the same dtype.
    """
    shapes = tuple(jax.eval_shape(lambda tree: tree, own) for own in params)
    boundaries = [jax.eval_shape(embed, shared, visit)]
    for chunk, own in zip(chunks, shapes, strict=True):
        boundaries.append(jax.eval_shape(chunk, own, boundaries[-1], visit))
    for what, found in (("parameters", shapes), ("activations between chunks", boundaries)):
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(found)})
        if len(dtypes) > 1:
            raise ConfigError(
                f"a pipeline whose chunks differ packs {what} into one array, but the dtypes are "
                f"{' and '.join(dtypes)}: use a single dtype"
            )
    return Packed(embed, tuple(chunks), head, shapes, tuple(boundaries))
