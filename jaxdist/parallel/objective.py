"""The training objective: the loss of a model on a batch, and the gradients of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxdist.jaxprs import depends_on
from jaxdist.models.functional import Functional
from jaxdist.models.layers import gradients_of
from jaxdist.models.loss import Batch, Loss, Sums, as_sums, weighted
from jaxdist.models.mean import divisor
from jaxdist.optim.loss_scale import scale_loss, unscale
from jaxdist.parallel.contract import BatchContext, Gradients, StepInputs
from jaxdist.trees import join_leaves
from jaxdist.types import Buffers, Params

NOWHERE = BatchContext()
LossAndAux = tuple[jax.Array, tuple[Sums, Any]]
"""A scalar to minimize, and a pair of the sums of loss and metrics and the next buffers."""


@dataclass(frozen=True)
class Objective:
    """A model and the loss that trains it.

    Attributes:
      model: the model to train.
      loss: the function from a model and a batch to the sums of the loss and its metrics.
    """

    model: Functional
    loss: Loss

    def sums(
        self,
        params: Params,
        buffers: Buffers,
        batch: Batch,
        key: jax.Array | None,
        around: BatchContext = NOWHERE,
    ) -> LossAndAux:
        """Compute the total loss of a batch, the sums of loss and metrics, and the next buffers.

        Args:
          params: the parameters of the model.
          buffers: the buffers of the model.
          batch: the rows of the batch.
          key: the random key for training mode, or None for evaluation mode.
          around: the context, which says over which axes a BatchNorm averages.

        Returns:
          The total loss, and a pair of the sums and the next buffers: the form of a function for
          `jax.grad` with `has_aux`.
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
        """Return the arguments of the loss after the batch: a tuple with the base model, or ().

        The base model is the model without its adapters. The tuple has the base model if the model
        has adapters and the loss takes the base model as a reference (`takes_base`).
        """
        if not (self.model.adapters and getattr(self.loss, "takes_base", False)):
            return ()
        base = replace(self.model, adapters=()).bind(params, buffers)
        base.eval()
        return (base,)

    def mean_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the mean loss of a batch.

        The arguments are the arguments of `jaxdist.parallel.contract.Compute.gradients`.
        """
        # The loss is divided before differentiation, because dividing the gradients would be
        # another pass over the gradients.
        found = self._differentiated(self._mean, held, around)
        if held.scale is None:
            return found
        return found._replace(grads=unscale(found.grads, held.scale))

    def total_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the total loss of a batch.

        The arguments are the arguments of `jaxdist.parallel.contract.Compute.gradients`.
        """
        if held.scale is None:
            return self._differentiated(self._total, held, around)
        # The loss scale is chosen for the mean loss. The product of the loss scale and the total
        # loss could overflow.
        found = self.mean_gradients(held, around)
        weight = _common(found.sums["loss"].weight, around)
        return found._replace(grads=jax.tree.map(lambda g: g * weight, found.grads))

    def field_gradients(self, held: StepInputs, field: str) -> jax.Array:
        """Compute the gradient of the mean loss of a whole batch with respect to a batch field.

        Args:
          held: the inputs of the step, with the whole batch.
          field: the name of an array of floats in the batch.
        """

        def mean(values: jax.Array) -> jax.Array:
            return self._mean(held._replace(batch={**held.batch, field: values}), NOWHERE)[0]

        return jax.grad(mean)(held.batch[field])

    def _differentiated(
        self, loss: Callable[..., LossAndAux], held: StepInputs, around: BatchContext
    ) -> Gradients:
        """Differentiate a loss, a function of the inputs and the context."""
        own, frozen = self.model.divided(held.params)

        def of_own(own: Params) -> LossAndAux:
            return loss(held._replace(params=join_leaves(own, frozen)), around)

        grads, (sums, buffers) = gradients_of(of_own, own)
        return Gradients(around.placed(grads), sums, buffers)

    def _total(self, held: StepInputs, around: BatchContext) -> LossAndAux:
        return self.sums(held.params, held.buffers, held.batch, held.key, around)

    def _mean(self, held: StepInputs, around: BatchContext) -> LossAndAux:
        """Compute the mean loss of a batch, and the pair of sums and next buffers.

        With a loss scale, the mean loss is multiplied by the scale.
        """
        total, aux = self._total(held, around)
        # The weight is a constant in the derivative, even if a loss computes its weight from the
        # outputs of the model. The gradients then equal the gradients of the total over the weight.
        weight = jax.lax.stop_gradient(aux[0]["loss"].weight)
        if held.scale is None:
            return total / divisor(weight), aux
        return scale_loss(total / _common(weight, around), held.scale), aux


def may_weigh_nothing(objective: Objective, batch: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Return whether the weight of a batch may be 0, because it depends on the batch's values.

    The answer is true if the batch has a leaf `weight`. Otherwise the loss is traced, and nothing
    is computed.
    """
    return "weight" in batch or measures(objective, batch)[1]


def measures(objective: Objective, batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[Sums, bool]:
    """Return the shapes of the sums of loss and metrics, and whether the weight may vary.

    The weight of the loss may vary if it depends on the values of the parameters, the buffers or
    the batch, and does not vary if it depends on shapes only.
    """

    def sums(params: Params, buffers: Buffers, batch: Batch) -> Sums:
        return objective.sums(params, buffers, batch, None)[1][0]

    model = objective.model
    trace = jax.make_jaxpr(sums, return_shape=True)
    jaxpr, shapes = trace(model.params, model.buffers, dict(batch))
    depends = depends_on(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.invars))
    return shapes, jax.tree.unflatten(jax.tree.structure(shapes), depends)["loss"].weight


def _common(weight: jax.Array, around: BatchContext) -> jax.Array:
    """Return the mean weight of a microbatch over devices, or 1 if the mean is 0.

    All devices must use the same weight, because ZeRO sums gradients over devices before they are
    multiplied by the weight.
    """
    if around.axes:
        weight = jax.lax.pmean(weight, around.axes)
    return divisor(weight)
