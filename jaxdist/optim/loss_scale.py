"""Dynamic loss scaling, which keeps float16 gradients from vanishing and from overflowing."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.types import Grads, Params


class LossScaleState(NamedTuple):
    """The factor on the loss (float32), and the number of finite steps since its last change."""

    scale: jax.Array
    good_steps: jax.Array


def scale_for(params: Params, state: LossScaleState | None) -> LossScaleState | None:
    """Return `state`, or a scale of 1 if `state` is None and a parameter is in float16.

    If `state` is None and no parameter is in float16, the result is None. With a scale, a backward
    pass starts from the mean loss of a microbatch, and gradients are added up over microbatches in
    float32. Without a scale, a backward pass starts from the total loss. The gradients of the total
    loss are safe in float32 and bfloat16, but overflow float16 if a batch has many tokens.
    """
    narrow = any(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(params))
    one = LossScaleState(jnp.float32(1), jnp.int32(0))
    return one if state is None and narrow else state


def scale_loss(loss: jax.Array, state: LossScaleState) -> jax.Array:
    """Multiply the loss by the scale, in float32."""
    return loss.astype(jnp.float32) * state.scale


def unscale(grads: Grads, state: LossScaleState) -> Grads:
    """Convert gradients of the scaled loss to float32 gradients of the loss."""
    # The cast comes before the division: in float16 the unscaled gradient would vanish again.
    return jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)


class DynamicLossScaleConfig(Config):
    """A factor on the loss that grows after steps without overflow and shrinks at each overflow.

    The factor keeps float16 gradients from vanishing. A step is:

        grads = jax.grad(lambda p: scale_loss(loss(p), scale_state))(params)
        finite = all_finite(grads)
        grads = unscale(grads, scale_state)
        updates, state = skip_nonfinite(inner).update(grads, state, params)
        scale_state = scaling.update(scale_state, finite)
    """

    type: Literal["dynamic"]
    """The name that selects this rule in a config."""
    init_scale: PositiveFloat = 2.0**15
    """The scale of the first step; a power of two scales without rounding."""
    growth: Annotated[float, Field(gt=1)] = 2.0
    """The factor on the scale after `growth_steps` steps without overflow."""
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The factor on the scale after a step with overflow, which is skipped."""
    growth_steps: Count = 2000
    """The number of consecutive steps without overflow after which the scale grows."""
    min_scale: PositiveFloat = 1.0
    """The lower bound of the scale of the loss."""
    max_scale: PositiveFloat = 2.0**24
    """The upper bound of the scale of the loss."""

    @model_validator(mode="after")
    def _in_order(self) -> DynamicLossScaleConfig:
        low, first, high = self.min_scale, self.init_scale, self.max_scale
        if not low <= first <= high:
            raise ValueError(
                f"min_scale <= init_scale <= max_scale does not hold for {low}, {first}, {high}: "
                "change one of these three scales"
            )
        return self

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(jnp.float32(self.init_scale), jnp.int32(0))

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Return the state after a step, given whether its gradients were all finite."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grow = good >= self.growth_steps
        factor = jnp.where(finite, jnp.where(grow, self.growth, 1.0), self.backoff)
        scale = jnp.clip(state.scale * factor, self.min_scale, self.max_scale)
        return LossScaleState(scale, jnp.where(grow, 0, good))
