"""The training objective: the loss of a model on rows, its scale, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxdist.models.functional import Functional
from jaxdist.models.layers import carried
from jaxdist.models.loss import Batch, Loss, Sums, as_sums, weighted
from jaxdist.models.mean import divisor
from jaxdist.optim.loss_scale import DynamicLossScale
from jaxdist.parallel.contract import BatchContext, Gradients, StepInputs
from jaxdist.parallel.pipeline.split_backward.jaxprs import depends_on
from jaxdist.trees import join_leaves
from jaxdist.types import Buffers, Params

NOWHERE = BatchContext()
_SCALING = DynamicLossScale()
"""A loss scale with any settings: scaling and unscaling do not depend on the settings."""


@dataclass(frozen=True)
class Objective:
    """A model with its loss."""

    model: Functional
    loss: Loss

    def sums(
        self,
        params: Params,
        buffers: Buffers,
        batch: Batch,
        key: jax.Array | None,
        around: BatchContext = NOWHERE,
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Compute the total loss of a batch, all sums, and the next buffers.

        Args:
          key: random key of training mode; None selects evaluation mode.
        """
        batch = weighted(batch)
        module = self.model.bind(
            params, buffers, key, statistics_over=around.statistics_over if key is not None else ()
        )
        module.train() if key is not None else module.eval()
        found = self.loss(module, batch, *self._base(params, buffers))
        sums = as_sums(found, batch, training=key is not None)
        return sums["loss"].total, (sums, self.model.buffers_of(module))

    def _base(self, params: Params, buffers: Buffers) -> tuple[Any, ...]:
        """Return the model without its adapters, if the loss takes it as a reference, else ()."""
        if not (self.model.adapters and getattr(self.loss, "takes_base", False)):
            return ()
        base = replace(self.model, adapters=()).bind(params, buffers)
        base.eval()
        return (base,)

    def mean_gradients(
        self, held: StepInputs, batch: Batch, key: jax.Array, around: BatchContext
    ) -> Gradients:
        """Compute gradients of the mean loss of a batch."""
        # The loss is divided before differentiation, because dividing the gradients would be a
        # further pass over them.
        own, frozen = self.model.divided(held.params)

        def mean(own: Params) -> tuple[jax.Array, tuple[Sums, Any]]:
            given = (join_leaves(own, frozen), held.buffers, batch, key)
            return self._mean(held, around, *given)

        grads, (sums, buffers) = jax.grad(mean, has_aux=True)(own)
        grads = around.placed(carried(grads))
        if held.scale is not None:
            grads = _SCALING.unscale(grads, held.scale)
        return Gradients(grads, sums, buffers)

    def total_gradients(
        self, held: StepInputs, batch: Batch, key: jax.Array, around: BatchContext
    ) -> Gradients:
        """Compute gradients of the total loss of a batch."""
        if held.scale is not None:
            # The loss scale is chosen for the mean loss: times the total loss, it would overflow.
            found = self.mean_gradients(held, batch, key, around)
            weight = _common(found.sums["loss"].weight, around)
            return found._replace(grads=jax.tree.map(lambda g: g * weight, found.grads))
        own, frozen = self.model.divided(held.params)

        def total(own: Params) -> tuple[jax.Array, tuple[Sums, Any]]:
            return self.sums(join_leaves(own, frozen), held.buffers, batch, key, around)

        grads, (sums, buffers) = jax.grad(total, has_aux=True)(own)
        return Gradients(around.placed(carried(grads)), sums, buffers)

    def field_gradients(
        self, held: StepInputs, batch: Batch, key: jax.Array, field: str
    ) -> jax.Array:
        """Compute gradients of the mean loss of a whole batch with respect to one of its fields."""

        def mean(values: jax.Array) -> jax.Array:
            given = {**batch, field: values}
            return self._mean(held, NOWHERE, held.params, held.buffers, given, key)[0]

        return jax.grad(mean)(batch[field])

    def _mean(
        self,
        held: StepInputs,
        around: BatchContext,
        params: Params,
        buffers: Buffers,
        batch: Batch,
        key: jax.Array,
    ) -> tuple[jax.Array, tuple[Sums, Any]]:
        """Compute the mean loss of a batch, times the loss scale if any, and the sums."""
        total, aux = self.sums(params, buffers, batch, key, around)
        # The weight counts as a constant, as if gradients of the total were divided by it, even
        # where a loss computes its weight from the outputs of the model.
        weight = jax.lax.stop_gradient(aux[0]["loss"].weight)
        if held.scale is None:
            return total / divisor(weight), aux
        return _SCALING.scale_loss(total / _common(weight, around), held.scale), aux


def may_weigh_nothing(objective: Objective, batch: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Return whether the weight of a batch depends on the batch's values, so that it may be 0.

    Nothing is computed: if the batch has no leaf `weight`, the traced loss is examined.
    """
    return "weight" in batch or measures(objective, batch)[1]


def measures(objective: Objective, batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[Sums, bool]:
    """Return the shapes of the loss's sums, and whether the loss's weight depends on values."""

    def sums(params: Params, buffers: Buffers, batch: Batch) -> Sums:
        return objective.sums(params, buffers, batch, None)[1][0]

    model = objective.model
    trace = jax.make_jaxpr(sums, return_shape=True)
    jaxpr, shapes = trace(model.params, model.buffers, dict(batch))
    depends = depends_on(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.invars))
    return shapes, jax.tree.unflatten(jax.tree.structure(shapes), depends)["loss"].weight


def _common(weight: jax.Array, around: BatchContext) -> jax.Array:
    """Return the mean weight of a microbatch over the devices, which is the same on all; never 0.

    The weight must be common, because ZeRO sums gradients over devices before they are multiplied
    by the weight.
    """
    if around.axes:
        weight = jax.lax.pmean(weight, around.axes)
    return divisor(weight)
