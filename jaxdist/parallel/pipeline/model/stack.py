"""Stacked layers stored in the order of the stages, so that a step need not move them.

If a stage has several chunks, these chunks are not adjacent in the model. If layers were stored in
the model's order, most parameters and gradients would be sent from stage to stage in each step.
Layers are therefore stored stage after stage, and reordered for files and other readers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdist.collectives.axis import permute
from jaxdist.parallel.pipeline.model.chunks import on_stages


def is_in_order(placement: Sequence[int]) -> bool:
    """Return whether the order of the chunks in the model is also their order by stage."""
    return on_stages(placement) == tuple(range(len(placement)))


@dataclass(frozen=True)
class StageStack:
    """The order by stage of leaves `[layers, ...]` that are split over the stages.

    All chunks have equally many layers.

    Attributes:
      axis: the mesh axis of the stages.
      placement: the stage of each chunk; all stages have equally many chunks.
    """

    mesh: Mesh
    axis: str
    placement: tuple[int, ...]

    def store(self, leaf: jax.Array) -> jax.Array:
        """Reorder a leaf from the model's order to the order by stage."""
        return _moved(leaf, self.mesh, self.axis, on_stages(self.placement))

    def restore(self, leaf: jax.Array) -> jax.Array:
        """Reorder a leaf from the order by stage to the model's order."""
        order = on_stages(self.placement)
        return _moved(leaf, self.mesh, self.axis, tuple(map(order.index, range(len(order)))))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _moved(leaf: jax.Array, mesh: Mesh, axis: str, sources: tuple[int, ...]) -> jax.Array:
    """Move the chunk at place `sources[i]` of a leaf to place i, for all i.

    Single chunks are permuted between devices. With a lookup in the whole leaf, a device would also
    hold the shares of other stages.
    """
    stages = mesh.shape[axis]
    each = len(sources) // stages

    def local(x: jax.Array, here: jax.Array) -> jax.Array:
        found = chunks = x.reshape(each, -1, *x.shape[1:])
        # Each permute moves chunks from place `old` on the senders to place `new` on the receivers,
        # so that a device sends, and receives, at most one chunk.
        for old, new in itertools.product(range(each), repeat=2):
            pairs = [
                (source // each, place // each)
                for place, source in enumerate(sources)
                if (source % each, place % each) == (old, new)
            ]
            moved = permute(chunks[old], axis, pairs)
            receives = jnp.isin(here, jnp.array([stage for _, stage in pairs], here.dtype))
            found = found.at[new].set(jnp.where(receives, moved, found[new]))
        return found.reshape(x.shape)

    spec = PartitionSpec(axis)
    moved = jax.shard_map(
        local, mesh=mesh, axis_names={axis}, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    # `lax.axis_index` does not compile here if XLA splits the leaf over other axes, so the index of
    # the stage is an argument.
    return moved(leaf, jnp.arange(stages))
