"""The exchange whose collectives XLA inserts, from the shardings of the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxdist.models.loss import Batch
from jaxdist.optim.safety import global_norm
from jaxdist.parallel.contract import BatchContext, Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.base import Base
from jaxdist.types import Grads, Params, PyTree


@dataclass(frozen=True)
class XlaExchange(Base):
    """The exchange by XLA, for a batch that is one global array."""

    explicit: bool = field(default=False, init=False)

    def gradients(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        return compute.mean_gradients(held, batch, key, self._around), state

    @property
    def _around(self) -> BatchContext:
        """The context that sets the shardings of new gradients: shards with ZeRO 2 or 3."""
        if self.zero is None:
            return BatchContext()
        lie = self.placements.shares if self.zero.stage >= 2 else self.trained(self.whole)
        return BatchContext(placed=partial(jax.lax.with_sharding_constraint, shardings=lie))

    def norm(self, grads: Grads) -> jax.Array:
        return global_norm(grads)

    def publish(self, params: Params, into: Params) -> PyTree:
        """Return the parameters unchanged, since XLA gathers them at the end of the step."""
        return params
