"""Stacked layers stored in the order of the stages, so that a step need not move them.

Where a stage has several chunks of the model, these are not adjacent in the model. Stored in the
model's order, most parameters and gradients would be sent from stage to stage in each step. They
are therefore stored stage after stage, and put into the model's order for files and other readers.
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
    """Return whether the model's order is that of the stages."""
    return on_stages(placement) == tuple(range(len(placement)))


@dataclass(frozen=True)
class StageStack:
    """Leaves `[layers, ...]`, split over the stages; all chunks have equally many layers.

    Attributes:
      axis: the mesh axis of the stages.
      placement: the stage of each chunk; all stages have equally many.
    """

    mesh: Mesh
    axis: str
    placement: tuple[int, ...]

    def store(self, leaf: jax.Array) -> jax.Array:
        """Reorder from the model's order to that of the stages."""
        return _moved(leaf, self.mesh, self.axis, on_stages(self.placement))

    def restore(self, leaf: jax.Array) -> jax.Array:
        """Invert `store`."""
        order = on_stages(self.placement)
        return _moved(leaf, self.mesh, self.axis, tuple(map(order.index, range(len(order)))))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _moved(leaf: jax.Array, mesh: Mesh, axis: str, sources: tuple[int, ...]) -> jax.Array:
    """Return a leaf with the chunk of place `sources[i]` in place i.

    It uses permutes of a chunk: no device ever holds another stage's share besides its own, as it
    would with a lookup in the whole leaf.
    """
    stages = mesh.shape[axis]
    each = len(sources) // stages

    def local(x: jax.Array, here: jax.Array) -> jax.Array:
        found = chunks = x.reshape(each, -1, *x.shape[1:])
        # One place on all senders, one on all receivers: each device sends, and receives, at most
        # once.
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
    # lax.axis_index does not compile here where XLA splits the leaf over other axes.
    return moved(leaf, jnp.arange(stages))
