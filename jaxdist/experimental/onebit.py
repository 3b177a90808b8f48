"""1-bit Adam, and the common functions and settings of 1-bit optimizers.

A 1-bit optimizer is for training in which devices exchange a compressed momentum instead of
gradients. The second moment is frozen before messages become lossy, because errors of messages
would corrupt it. The optimizers themselves do not communicate. The gradients must represent the
same momentum on all devices, which the feedback `CompressedMomentum` ensures. The `b1` of the
feedback must equal the optimizer's `b1`, and the codec must send uncompressed gradients in the
first `freeze_step` steps (`jaxdist.compression.warm_up`).
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
    """The state of `scale_by_frozen_adam`.

    Attributes:
      count: the number of steps.
      mu, nu: the first and the second moment, as trees like the parameters, in float32 or wider.
    """

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
    """Scale gradients like Adam, with a second moment that is frozen after `freeze_step` steps.

    The direction is the direction of 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1, which
    has no bias correction). In addition, an element whose gradient was zero in all of the first
    `freeze_step` steps never moves: see `frozen_direction`.

    Args:
      b1, b2: the decays of the first and the second moment.
      eps: a small number that is added to the root of the second moment.
      freeze_step: the number of steps after which the second moment is frozen.
      bias_correction: whether to divide the moments by the sums of their weights, as Adam does.
      bounded: whether an element moves at most as far as Adam could move it (`adam_bound`). The
        paper does not have this bound, which has no effect in the first `freeze_step` steps.

    Raises:
      ConfigError: a decay is outside of [0, 1), eps is negative, or freeze_step is below 1.

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
            # The frozen moment keeps the bias correction of the step in which it was frozen.
            one, two = _weight(b1, count), _weight(b2, jnp.minimum(count, freeze_step))

        def direction(m: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            return frozen_direction(m / one, v / two, eps, most).astype(g.dtype)

        return jax.tree.map(direction, mu, nu, updates), FrozenAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def first_moment(b1: float, m: jax.Array, g: jax.Array) -> jax.Array:
    """Return the next running mean of gradients.

    Args:
      b1: the decay.
      m: the running mean.
      g: the gradient.
    """
    return b1 * m + (1 - b1) * g.astype(m.dtype)


def second_moment(b2: float, moves: PyTree, v: jax.Array, g: jax.Array) -> jax.Array:
    """Return the next running mean of squared gradients.

    Args:
      b2: the decay.
      moves: whether the mean changes. If False, `v` is returned.
      v: the running mean.
      g: the gradient.
    """
    return jnp.where(moves, b2 * v + (1 - b2) * jnp.square(g.astype(v.dtype)), v)


def frozen_direction(m: jax.Array, v: jax.Array, eps: float, most: float) -> jax.Array:
    """Return m / (sqrt(v) + eps), limited to [-most, most], and zero where v is zero.

    An element of v is zero if the gradient was zero during the warm-up, as for rows of an embedding
    that occurred in no example. A 1-bit message cannot represent zero, and its error in such an
    element of m would be divided by eps. If an element of v is small but not zero, the element of m
    may be as large as the scale of its block in the message, and only `most` limits the quotient.
    """
    return jnp.where(v > 0, jnp.clip(m / (jnp.sqrt(v) + eps), -most, most), 0.0)


def adam_bound(b1: float, b2: float) -> float:
    """Return the largest distance that Adam can move an element in a step at learning rate 1.

    The bound is (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), or infinite if b1^2 >= b2. The bound
    follows from the Cauchy-Schwarz inequality for the weights of both moments. Kingma and Ba (arXiv
    1412.6980, section 2.1) have special cases.

    >>> round(adam_bound(0.9, 0.999), 2)
    7.27
    """
    if b1 * b1 >= b2:
        return math.inf
    return (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))


def _weight(b: float, count: jax.Array) -> jax.Array:
    """Return 1 - b^count, the sum of the weights of a running mean after `count` steps.

    The formula avoids cancellation, which would cost 4 of 7 digits at b = 0.999.
    """
    return -jnp.expm1(count.astype(jnp.float32) * (math.log(b) if b else -math.inf))


def check_freeze_step(freeze_step: int) -> None:
    """Check that the second moment contains a gradient when it is frozen.

    Raises:
      ConfigError: freeze_step is below 1.
    """
    if freeze_step < 1:
        raise ConfigError(
            f"freeze_step = {freeze_step}: must be at least 1, because the second moment is zero "
            "before the first step; use some hundreds of steps"
        )


class OnebitConfig(OptimizerConfig):
    """The settings that 1-bit optimizers share."""

    freeze_step: Count
    """The number of steps after which the second moment is frozen. The number must equal
    parallel.compression.warmup_steps."""
    b1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """The decay of the first moment. The decay must equal the b1 of the error_feedback
    compressed_momentum."""
    b2: Beta = 0.999
    """The decay of the second moment."""
    bounded: bool = True
    """Whether an element moves in a step at most as far as Adam could move it. The paper has no
    such limit."""

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
            f"{name} uses the norm of gradients, but compressed momenta have norms several times "
            "as large. Clip what devices send instead: parallel.compression.error_feedback: "
            f"{{type: compressed_momentum, clip_norm: ...}}"
        )


class OnebitAdamConfig(OnebitConfig):
    """1-bit Adam (Tang et al., arXiv 2102.02888), with decoupled weight decay."""

    type: Literal["onebit_adam"]
    """The name that selects this optimizer in a config."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """The decoupled weight decay, which is multiplied by the learning rate. Biases and norm scales
    do not decay."""
    bias_correction: bool = True
    """Whether to divide the moments by 1 - b^t in step t. The paper's algorithm does not divide
    them."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Return the update rule for a schedule of the learning rate.

        Args:
          rate: the schedule.
          tree: the parameters to optimize.
        """
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
