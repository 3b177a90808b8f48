"""The exchange by reduce-scatter: every device gets its shard of the sums (ZeRO 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.collectives.layer_chunks import Layers, by_layers
from jaxdist.parallel.contract import Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.explicit import Sharding, over, together
from jaxdist.types import Grads, PyTree


@dataclass(frozen=True)
class Scatter(Sharding):
    """The exchange that reduce-scatters gradients after the backward pass, in chunks of layers."""

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        found = self.stacked(compute, held)
        reduce = self.on_all_axes(self._mean_shards, self.zero.specs(self.specs))
        mean = reduce(found.grads, found.sums["loss"].weight)
        return found._replace(grads=self.zero.cut(mean)), state

    def _mean_shards(self, grads: Grads, weight: jax.Array) -> PyTree:
        return over(weight, self.finish(self._scattered(grads)))

    def _scattered(self, grads: Grads) -> PyTree:
        """Reduce-scatter the leaves that ZeRO splits, over ZeRO's axes.

        The other leaves are returned without a sum.
        """
        leaves, structure = jax.tree.flatten(grads)
        wire, dims = self.wire(), self.zero.dims_of(grads)

        def scatter(positions: list[int], leaves: Layers) -> Layers:
            return together(wire.scatter, leaves, [dims[i] for i in positions])

        layers = self.layers_of(grads, dims)
        return structure.unflatten(by_layers(scatter, leaves, layers, self.chunk_bytes(leaves)))
