"""The exchange whose collectives XLA inserts, from the shardings of the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxdist.models.host.resting import constrained, deferred
from jaxdist.models.loss import Batch, Sums
from jaxdist.optim.safety import global_norm
from jaxdist.parallel.contract import BatchContext, Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.base import Base
from jaxdist.types import Buffers, Grads, Params, PyTree


@dataclass(frozen=True)
class XlaExchange(Base):
    """The exchange by XLA, for a batch that is one global array."""

    explicit: bool = field(default=False, init=False)

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        held = held._replace(params=deferred(held.params, self.zero.resting, self.frozen))
        return compute.mean_gradients(held, self._around), state

    def sums(self, compute: Compute, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        return compute.sums(deferred(params, self.zero.resting, self.frozen), buffers, batch)

    def shares(self, grads: Grads, params: Params) -> tuple[Any, Any]:
        if not self.zero.resting:
            return super().shares(grads, params)
        # Parameters that rest in the host's memory are copied to the device before they are split.
        lie = self.placements.shares
        grads = jax.lax.with_sharding_constraint(grads, lie)
        return grads, constrained(params, lie, self.zero.resting)

    @property
    def _around(self) -> BatchContext:
        """The context that sets the shardings of new gradients.

        With ZeRO 2 or 3, each device keeps its shards of the gradients. With ZeRO 1, the gradients
        have the shardings that the parameters have before ZeRO splits them. Without ZeRO, the
        context sets no shardings.
        """
        if not self.zero.stage:
            return BatchContext()
        lie = self.placements.shares if self.zero.stage >= 2 else self.trained(self.whole)
        return BatchContext(placed=partial(jax.lax.with_sharding_constraint, shardings=lie))

    def norm(self, grads: Grads) -> jax.Array:
        return global_norm(grads)

    def publish(self, params: Params, into: Params) -> PyTree:
        """Return the parameters unchanged, since XLA gathers them at the end of the step."""
        return params
