"""The storage of stacked layers in the order by stage, so that a step does not move parameters.

If a stage has several chunks, these chunks are not adjacent in the model. With layers in the
model's order, most parameters and gradients would be sent between stages in each step. The layers
are therefore stored in the order by stage: the layers of stage 0, then of stage 1, and so on. The
layers are reordered when a checkpoint is written or another part of jaxdist reads them.
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
    """Return whether the order of the chunks by stage equals their order in the model."""
    return on_stages(placement) == tuple(range(len(placement)))


@dataclass(frozen=True)
class StageStack:
    """The order, by stage, of the layers in stacked leaves, which are split over the stages.

    All chunks must have the same number of layers.

    Attributes:
      mesh: the mesh with the axis `stage`.
      axis: the mesh axis of the stages.
      placement: the stage of each chunk. All stages must have the same number of chunks.
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
    """Move the chunk at index `sources[i]` of a leaf to index i, for all i.

    Each permute sends single chunks between devices. With a lookup in the whole leaf, a device
    would also hold the chunks of other stages.
    """
    stages = mesh.shape[axis]
    each = len(sources) // stages

    def local(x: jax.Array, here: jax.Array) -> jax.Array:
        found = chunks = x.reshape(each, -1, *x.shape[1:])
        # Each permute moves chunks from index `old` on the senders to index `new` on the receivers,
        # so that a device sends at most one chunk and receives at most one chunk.
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
