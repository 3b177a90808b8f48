"""1-bit Adam, and the common part of optimizers whose momentum is compressed.

The second moment is frozen before messages become lossy, because the losses would corrupt it.
Sending is not part of these optimizers. They need gradients that represent the same momentum on all
devices, as the feedback `CompressedMomentum` returns them: with the same `b1`, and with a codec
that sends everything in the first `freeze_step` steps (`jaxdist.compression.warm_up`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.optim.common import Beta, NamedParams, OptimizerConfig
from jaxdist.optim.layers import StepCount, wide_zeros
from jaxdist.optim.trust_ratio import check_betas, check_numbers
from jaxdist.types import OptState, Params, PyTree, Updates


class FrozenAdamState(NamedTuple):
    """The number of steps, and the moments: trees like the parameters, float32 or wider."""

    count: StepCount
    mu: Updates
    nu: Updates


def scale_by_frozen_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    freeze_step: int,
    bias_correction: bool = True,
    bounded: bool = True,
) -> optax.GradientTransformation:
    """Adam's direction, with the second moment frozen after `freeze_step` steps.

    1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1, which has no bias correction). In
    addition, elements whose gradient was zero in all of these steps do not move: see
    `frozen_direction`.

    Args:
      bounded: no element moves farther than Adam could move it (`adam_bound`), a bound that the
        paper does not have; it has no effect in the first `freeze_step` steps.

    Raises:
      ConfigError: decays outside of [0, 1), a negative eps, a freeze_step below 1.

    >>> tx = scale_by_frozen_adam(freeze_step=1)
    >>> _, state = tx.update(jnp.float32(2), tx.init(jnp.float32(0)))
    >>> round(float(tx.update(jnp.float32(-2), state)[0]), 3)  # ((0.9 2 - 2) / 0.19 / 10) / 2
    -0.053
    """
    check_betas(b1=b1, b2=b2)
    check_numbers(eps=eps)
    check_freeze_step(freeze_step)
    most = adam_bound(b1, b2) if bounded else math.inf

    def init(params: Params) -> OptState:
        mu, nu = (jax.tree.map(wide_zeros, params) for _ in range(2))
        return FrozenAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        updates: Updates, state: OptState, params: Params = None
    ) -> tuple[Updates, OptState]:
        count: PyTree = optax.safe_increment(state.count)
        mu = jax.tree.map(partial(first_moment, b1), state.mu, updates)
        nu = jax.tree.map(partial(second_moment, b2, count <= freeze_step), state.nu, updates)
        one, two = jnp.float32(1), jnp.float32(1)
        if bias_correction:
            one, two = _weight(b1, count), _weight(b2, jnp.minimum(count, freeze_step))

        def direction(m: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            return frozen_direction(m / one, v / two, eps, most).astype(g.dtype)

        return jax.tree.map(direction, mu, nu, updates), FrozenAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def first_moment(b1: float, m: jax.Array, g: jax.Array) -> jax.Array:
    """Add a gradient to the running mean of gradients."""
    return b1 * m + (1 - b1) * g.astype(m.dtype)


def second_moment(b2: float, moves: PyTree, v: jax.Array, g: jax.Array) -> jax.Array:
    """Add a square to the running mean of squares, where it still moves."""
    return jnp.where(moves, b2 * v + (1 - b2) * jnp.square(g.astype(v.dtype)), v)


def frozen_direction(m: jax.Array, v: jax.Array, eps: float, most: float) -> jax.Array:
    """Return m / (sqrt(v) + eps), at most `most` in size, and zero where v is zero.

    Where v is zero, the gradient was zero in all of the warm-up (rows of an embedding that occurred
    in no example). 1-bit messages cannot represent zero: their error in the momentum would be
    divided by eps. Where v is small, only this bound limits a block's scale over its root.
    """
    return jnp.where(v > 0, jnp.clip(m / (jnp.sqrt(v) + eps), -most, most), 0.0)


def adam_bound(b1: float, b2: float) -> float:
    """Return the largest distance that Adam moves an element in a step, in learning rates.

    The bound is (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), from the Cauchy-Schwarz inequality for
    the weights of both moments (Kingma and Ba, arXiv 1412.6980, section 2.1, has special cases); it
    is infinite if b1^2 >= b2.

    >>> round(adam_bound(0.9, 0.999), 2)
    7.27
    """
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))


def _weight(b: float, count: jax.Array) -> jax.Array:
    """Return 1 - b^count without the cancellation of float32 (4 of 7 digits at b = 0.999)."""
    return -jnp.expm1(count.astype(jnp.float32) * (math.log(b) if b else -math.inf))


def check_freeze_step(freeze_step: int) -> None:
    """Refuse a freeze_step before the second moment has seen a gradient.

    Raises:
      ConfigError: freeze_step is below 1.
    """
    if freeze_step < 1:
        raise ConfigError(
            f"freeze_step = {freeze_step}: must be at least 1, or there is no second moment to "
            "divide by; take some hundreds of steps"
        )


class OnebitConfig(OptimizerConfig):
    """The settings that 1-bit optimizers share."""

    freeze_step: Count
    """Steps before the second moment is frozen; equal to parallel.compression.warmup_steps."""
    b1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Decay of the first moment; equal to b1 of error_feedback compressed_momentum."""
    b2: Beta = 0.999
    """Decay of the second moment."""
    bounded: bool = True
    """Let no element move farther in a step than it could with Adam; false follows the paper."""

    @property
    def frozen_from(self) -> int:
        """The step at which the second moment is frozen."""
        return self.freeze_step

    @model_validator(mode="after")
    def _looks_at_no_norm(self) -> OnebitConfig:
        name = "clip_norm" if self.clip_norm is not None else "skip_spikes"
        if self.clip_norm is None and self.skip_spikes is None:
            return self
        raise ValueError(
            f"{name} looks at the norm of gradients, and those of compressed momenta are several "
            "times as large as what they stand for; clip what devices send, by "
            "parallel.compression.error_feedback: {type: compressed_momentum, clip_norm: ...}"
        )


class OnebitAdamConfig(OnebitConfig):
    """1-bit Adam (Tang et al., arXiv 2102.02888), with decoupled weight decay."""

    type: Literal["onebit_adam"]
    """Selects this optimizer."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay, times the learning rate; biases and norm scales are left out."""
    bias_correction: bool = True
    """Divide the moments by 1 - b^t; the paper's algorithm does not."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """The update rule for a learning-rate schedule on these parameters."""
        return optax.chain(
            scale_by_frozen_adam(
                self.b1,
                self.b2,
                self.eps,
                freeze_step=self.freeze_step,
                bias_correction=self.bias_correction,
                bounded=self.bounded,
            ),
            optax.add_decayed_weights(self.weight_decay, tree.matrices),
            optax.scale_by_learning_rate(rate),
        )
