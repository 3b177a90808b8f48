"""Dynamic loss scaling, which keeps float16 gradients from vanishing and from overflowing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field, PositiveFloat

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError
from jaxdist.types import Grads, Params


class DynamicLossScaleConfig(Config):
    """A factor on the loss that grows after steps without overflow and shrinks at each overflow."""

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

    def build(self) -> DynamicLossScale:
        """Build the loss scale from these settings.

        Raises:
          ConfigError: min_scale <= init_scale <= max_scale does not hold.
        """
        return DynamicLossScale(**self.model_dump(exclude={"type"}))


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


@dataclass(frozen=True)
class DynamicLossScale:
    """A factor on the loss, found by trial, that keeps float16 gradients from vanishing.

    The factor grows after `growth_steps` finite steps and shrinks at each overflow. A power of two
    scales without rounding. A step is:

        grads = jax.grad(lambda p: scaling.scale_loss(loss(p), scale_state))(params)
        finite = all_finite(grads)
        grads = scaling.unscale(grads, scale_state)
        updates, state = skip_nonfinite(inner).update(grads, state, params)
        scale_state = scaling.update(scale_state, finite)

    Raises:
      ConfigError: min <= init <= max, growth > 1, 0 < backoff < 1 or growth_steps >= 1 does not
        hold.
    """

    init_scale: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    growth_steps: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        low, first, high = self.min_scale, self.init_scale, self.max_scale
        if not 0 < low <= first <= high < float("inf"):
            raise ConfigError(
                f"loss scale: 0 < min_scale <= init_scale <= max_scale < inf does not hold for "
                f"{low}, {first}, {high}: change one of these three scales"
            )
        if not 1 < self.growth < float("inf"):
            raise ConfigError(
                f"loss scale: growth {self.growth} must be finite and above 1, such as 2"
            )
        if not 0 < self.backoff < 1:
            raise ConfigError(f"loss scale: backoff {self.backoff} must be in (0, 1), such as 0.5")
        if self.growth_steps < 1:
            raise ConfigError(f"loss scale: growth_steps {self.growth_steps} must be at least 1")

    def init(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(jnp.float32(self.init_scale), jnp.int32(0))

    def scale_loss(self, loss: jax.Array, state: LossScaleState) -> jax.Array:
        """Multiply the loss by the scale, in float32."""
        return loss.astype(jnp.float32) * state.scale

    def unscale(self, grads: Grads, state: LossScaleState) -> Grads:
        """Convert gradients of the scaled loss to float32 gradients of the loss."""
        # The cast comes before the division: in float16 the unscaled gradient would vanish again.
        return jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Return the state after a step, given whether its gradients were all finite."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grow = good >= self.growth_steps
        factor = jnp.where(finite, jnp.where(grow, self.growth, 1.0), self.backoff)
        scale = jnp.clip(state.scale * factor, self.min_scale, self.max_scale)
        return LossScaleState(scale, jnp.where(grow, 0, good))
