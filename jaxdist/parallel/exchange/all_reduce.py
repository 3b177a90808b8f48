"""The exchange by all-reduce: every device gets the sum of all gradients (no ZeRO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.collectives.layer_chunks import Layers, by_layers
from jaxdist.parallel.contract import Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.explicit import Explicit, over
from jaxdist.types import Grads, PyTree


@dataclass(frozen=True)
class AllReduce(Explicit):
    """The exchange that all-reduces whole gradients, a few layers at a time."""

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        found = self.stacked(compute, held)
        return found._replace(grads=self.mean(found.grads, found.sums["loss"].weight)), state

    def mean(self, stacked: Grads, weight: jax.Array) -> PyTree:
        """Sum the gradients in `stacked` over devices, and divide the sums by a weight.

        The method `stacked` returns such a tree, which has the gradients of every device.
        """
        return self.on_all_axes(self._mean_of_own, self.specs)(stacked, weight)

    def _mean_of_own(self, grads: Grads, weight: jax.Array) -> PyTree:
        leaves, structure = jax.tree.flatten(grads)
        layers = self.layers_of(grads, [None] * len(leaves))

        def mean(positions: list[int], leaves: Layers) -> Layers:
            # A chunk is divided directly after its sum. A division after all sums would be another
            # pass over the gradients, with another buffer.
            return over(weight, self.sum(leaves, self.axes))

        return structure.unflatten(by_layers(mean, leaves, layers, self.chunk_bytes(leaves)))
