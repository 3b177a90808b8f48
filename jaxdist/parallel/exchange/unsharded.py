"""The exchange that sums gradients into shards during the backward pass (ZeRO 2 and 3).

With stage 3, which PyTorch calls FSDP, parameters are stored as shards too. Each layer's parameters
are gathered when the layer runs, or all parameters are gathered once per step. The module
`jaxdist.parallel.unshard` gathers the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.parallel.contract import Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.explicit import Sharding, over
from jaxdist.parallel.unshard import SplitDim, defer, on_blocks
from jaxdist.types import Params, PyTree


@dataclass(frozen=True)
class Unsharded(Sharding):
    """The exchange that reduce-scatters each layer's gradients during the backward pass."""

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        specs = self.trained(self.shard_specs(held.stored))
        given = {"enter": self.deferred, "leave": self.finish, "grads_specs": specs}
        found = self.on_rows(compute, held, **given)
        mean = over(found.sums["loss"].weight, self.zero.cut(found.grads))
        return found._replace(grads=mean), state

    def deferred(self, params: Params) -> PyTree:
        """Replace each parameter that ZeRO splits by a deferred parameter (see `defer`).

        With stage 3, a deferred parameter is gathered when a layer uses it, or here if all
        parameters are gathered once per step. In both stages, its gradient is reduce-scattered in
        the backward pass.
        """
        zero, wire, (leaves, structure) = self.zero, self.wire(), jax.tree.flatten(params)
        given = zero.dims_of(params), zero.lengths_of(params), jax.tree.leaves(self.all_specs)
        seconds = self._seconds(params) if zero.config.secondary else [None] * len(leaves)
        settings = {"sharded": zero.stage == 3, "once": zero.once}
        found = []
        for leaf, dim, length, spec, second in zip(leaves, *given, seconds, strict=True):
            if dim is not None:
                spec = PartitionSpec(*spec, *(None,) * (leaf.ndim - len(spec)))
                split = SplitDim(dim - leaf.ndim, spec, length)
                leaf = defer(leaf, split, wire, second=second, **settings)
            found.append(leaf)
        return structure.unflatten(found)

    def _seconds(self, params: Params) -> list[jax.Array | None]:
        """Gather a second copy of the shards across the slow network.

        Later gathers of this copy use the fast network only. Each copy has an additional dim, which
        counts fast networks. This dim is the first dim, or the second dim in a stack of layers. In
        a slice that has a single layer of a stack, the additional dim is therefore the first dim
        too.

        Returns:
          A copy for each leaf that ZeRO splits, and None for the other leaves.
        """
        leaves, dims = jax.tree.leaves(params), self.zero.dims_of(params)
        mine = [i for i, dim in enumerate(dims) if dim is not None]
        specs = jax.tree.leaves(self.all_specs)
        hold = on_blocks(
            self.wire().hold,
            [specs[i] for i in mine],
            [PartitionSpec(None, *specs[i]) for i in mine],
        )
        stacked = self.layers_of(params, dims)
        seconds: list[jax.Array | None] = [None] * len(leaves)
        for i, held in zip(mine, hold([leaves[i] for i in mine]), strict=True):
            seconds[i] = held if stacked[i] is None else jnp.moveaxis(held, 0, 1)
        return seconds
