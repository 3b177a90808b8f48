"""Gradients are summed into shards where the backward pass makes them (ZeRO 2 and 3).

In stage 3, which torch calls FSDP, parameters are shards too, and each layer's are gathered where
it runs: see `jaxdist.parallel.unshard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.models.loss import Batch
from jaxdist.parallel.contract import Compute, Gradients, Held
from jaxdist.parallel.exchange.explicit import EVERYWHERE, Sharding, over
from jaxdist.parallel.unshard import defer
from jaxdist.types import Params, PyTree


@dataclass(frozen=True)
class Unsharded(Sharding):
    """A reduce-scatter of each layer's gradients in the backward pass."""

    def gradients(
        self, compute: Compute, held: Held, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        shards = self.zero.specs(jax.tree.map(lambda _: EVERYWHERE, held.stored))
        found = self.on_rows(
            compute,
            held,
            batch,
            key,
            enter=self._deferred,
            leave=self.finish,
            params_specs=shards if self.zero.stage == 3 else EVERYWHERE,
            grads_specs=shards,
        )
        mean = over(found.sums["loss"].weight, self.zero.cut(found.grads))
        return found._replace(grads=mean), state

    def _deferred(self, params: Params) -> PyTree:
        """Parameters that are gathered, or whose gradients leave, where they are used."""
        zero = self.zero
        wire, sharded = self.wire(), zero.stage == 3
        leaves, structure = jax.tree.flatten(params)
        given = zero.dims_of(params), zero.lengths_of(params), jax.tree.leaves(self.specs)
        deferred = [
            leaf if dim is None else defer(leaf, dim, wire, spec, sharded=sharded, length=length)
            for leaf, dim, length, spec in zip(leaves, *given, strict=True)
        ]
        return structure.unflatten(deferred)
