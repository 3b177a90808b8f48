"""LARS (You et al. 2017, arXiv 1708.03888), and its variants in other libraries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import NonNegativeFloat, PositiveFloat

from jaxdist.optim.common import Beta, LayerwiseConfig, NamedParams
from jaxdist.optim.layers import StepCount
from jaxdist.optim.layerwise import Leaves, RuleInputs, choose_rule, layerwise
from jaxdist.optim.trust_ratio import (
    Mask,
    NormPair,
    check_betas,
    check_numbers,
    layer_norms,
    trust_ratio,
    usable,
)
from jaxdist.types import PyTree, Scalar, Specs, Updates

LarsVariant = Literal["paper", "optax", "apex", "timm"]


@dataclass(frozen=True)
class LarsRule:
    """The differences between implementations of LARS.

    Attributes:
      norm_of_sum: whether to divide by ||g + weight_decay w|| rather than by ||g|| + weight_decay
        ||w||, with the gradient g and the weights w.
      rate_in_momentum: whether the learning rate is a factor before the momentum. Otherwise the
        learning rate is a factor after the momentum.
      decay_vectors: whether biases and norm scales decay too, unless a mask excludes them.
      adapt_vectors: whether the trust ratio scales biases and norm scales too, unless a mask
        excludes them.
      adapt_undecayed: whether the trust ratio scales parameters without decay.
      clip_to_rate: whether the ratio is replaced by min(ratio / learning rate, 1) (LARC).
      decay_zero_grads: whether a layer whose ratio is undefined still decays; an example is a layer
        whose gradients are all zero.
      nesterov: whether to use Nesterov's momentum, which looks one step ahead.
    """

    norm_of_sum: bool = False
    rate_in_momentum: bool = True
    decay_vectors: bool = False
    adapt_vectors: bool = False
    adapt_undecayed: bool = True
    clip_to_rate: bool = False
    decay_zero_grads: bool = True
    nesterov: bool = False


LARS_RULES: dict[LarsVariant, LarsRule] = {
    "paper": LarsRule(),
    "optax": LarsRule(norm_of_sum=True, decay_vectors=True, adapt_vectors=True),
    "apex": LarsRule(
        rate_in_momentum=False, adapt_vectors=True, clip_to_rate=True, decay_zero_grads=False
    ),
    "timm": LarsRule(rate_in_momentum=False, adapt_vectors=True, adapt_undecayed=False),
}


class LarsState(NamedTuple):
    """The number of steps, and the momentum as a tree like the parameters, float32 or wider."""

    count: StepCount
    momentum: Updates


def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    *,
    variant: LarsVariant = "paper",
    layer_dims: PyTree = None,
    decay_mask: Mask | None = None,
    adapt_mask: Mask | None = None,
    specs: Specs = None,
    **options: object,
) -> optax.GradientTransformationExtraArgs:
    """Build LARS: SGD with momentum; a step is a fraction of the norm of the layer's weights.

    ratio = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + eps)
    v <- momentum v + learning_rate ratio (g + weight_decay w);  w <- w - v

    Here w are the weights, g is the gradient, and v is the velocity. A layer whose weights or
    gradients are all zero has ratio 1.

    Args:
      variant: the implementation to follow; `options` override fields of its `LarsRule`.
      layer_dims, decay_mask, adapt_mask, specs: the arguments of
        `jaxdist.optim.layerwise.layerwise`. Parameters to which the ratio does not apply are
        updated by plain momentum.

    Raises:
      ConfigError: an update lacks the parameters, or a number, dim, axis, mask or option is
        invalid.

    >>> tx = lars(0.1, weight_decay=0.0)
    >>> w = {"kernel": jnp.full((2, 3), 2.0)}
    >>> update, _ = tx.update({"kernel": jnp.ones((2, 3))}, tx.init(w), w)
    >>> round(float(update["kernel"][0, 0]), 6)
    -0.0002
    """
    check_numbers(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        trust_coefficient=trust_coefficient,
        eps=eps,
    )
    check_betas(momentum=momentum)
    rule = lars_rule(variant, **options)
    step = partial(_step, momentum=momentum, coefficient=trust_coefficient, eps=eps, rule=rule)
    by_leaf = (layer_dims, decay_mask, adapt_mask, specs)
    return layerwise(step, LarsState, rule, learning_rate, weight_decay, *by_leaf)


def _step(
    now: RuleInputs, *, momentum: float, coefficient: float, eps: float, rule: LarsRule
) -> tuple[Leaves, ...]:
    """Compute the updates of a step, and the momentum after the step."""
    leaves = zip(now.params, now.grads, *now.moments, now.decay, strict=True)
    tensors = [_Tensors(*x) for x in leaves]
    ratio = partial(_ratio, coefficient=coefficient, eps=eps, rate=now.rate, rule=rule)
    on = now.adapting
    norms = layer_norms([tensors[i].pair(rule) for i in on], [now.leaves[i] for i in on])
    scaled = {i: ratio(tensors[i], pair) for i, pair in zip(on, norms, strict=True)}
    moved = [
        _moved(x, *scaled.get(i, (1.0, x.decay)), momentum, now.rate, rule)
        for i, x in enumerate(tensors)
    ]
    return [update for update, _ in moved], [velocity for _, velocity in moved]


def lars_rule(variant: LarsVariant, **options: object) -> LarsRule:
    """Return the rule of a variant, with some fields replaced.

    Raises:
      ConfigError: the variant or an option does not exist.
    """
    return choose_rule("lars", LARS_RULES, variant, options)


class _Tensors(NamedTuple):
    """A leaf's weights, gradient, momentum before this step, and rate of decay."""

    p: jax.Array
    g: jax.Array
    v: jax.Array
    decay: float

    def direction(self, decay: Scalar) -> jax.Array:
        """Return the gradient with weight decay, in the momentum's dtype."""
        wide = self.g.astype(self.v.dtype)
        return wide + decay * self.p if self.decay else wide

    def pair(self, rule: LarsRule) -> tuple[jax.Array, jax.Array]:
        """Return the weights and the gradient, whose norms the trust ratio compares.

        If the rule has `norm_of_sum`, the second tensor is the sum of gradient and weight decay.
        """
        return self.p, self.direction(self.decay) if rule.norm_of_sum else self.g


def _ratio(
    x: _Tensors, norms: NormPair, *, coefficient: float, eps: float, rate: Scalar, rule: LarsRule
) -> tuple[jax.Array, Scalar]:
    """Return the trust ratio and the rate of weight decay of each layer."""
    # The norm of the sum already contains the weight decay.
    added = eps if rule.norm_of_sum else eps + x.decay * norms.weight
    ratio = trust_ratio(norms, coefficient=coefficient, eps=added)
    fine = usable(norms)
    if rule.clip_to_rate:
        # LARC replaces the learning rate by min(ratio, rate). The step is multiplied by the rate
        # later, so the minimum is divided by the rate here.
        ratio = jnp.where(fine, jnp.minimum(ratio / rate, 1.0), 1.0)
    return ratio, x.decay if rule.decay_zero_grads else jnp.where(fine, x.decay, 0.0)


def _moved(
    x: _Tensors, ratio: Scalar, decay: Scalar, momentum: float, rate: Scalar, rule: LarsRule
) -> tuple[jax.Array, jax.Array]:
    """Return the update, in the parameter's dtype, and the new momentum."""
    before, after = (rate, 1.0) if rule.rate_in_momentum else (1.0, rate)
    step = (before * ratio) * x.direction(decay)
    velocity = momentum * x.v + step
    move = step + momentum * velocity if rule.nesterov else velocity
    return -(after * move).astype(x.p.dtype), velocity


class LarsConfig(LayerwiseConfig):
    """LARS (You et al., arXiv 1708.03888): momentum scaled by layer, for large batch sizes."""

    type: Literal["lars"]
    """The name that selects this optimizer in a config."""
    variant: LarsVariant = "paper"
    """The implementation to follow, which gives the values of the settings that are null."""
    momentum: Beta = 0.9
    """The decay of the velocity, which LARS subtracts from the weights."""
    weight_decay: NonNegativeFloat = 1e-4
    """The L2 decay that is added to the gradient."""
    trust_coefficient: PositiveFloat = 0.001
    """The distance that a layer moves at a learning rate of 1, as a fraction of the norm of its
    weights."""
    eps: NonNegativeFloat = 0.0
    """A small number that is added to the denominator of the trust ratio."""
    norm_of_sum: bool | None = None
    """Whether to divide by the norm of the sum of gradient and decay rather than by the sum of
    their norms; null leaves this to the variant."""
    rate_in_momentum: bool | None = None
    """Whether to multiply by the learning rate before the momentum. false multiplies after the
    momentum, and null leaves this to the variant."""
    clip_to_rate: bool | None = None
    """Whether to make no step larger than the step of plain momentum (LARC); null leaves this to
    the variant."""
    decay_zero_grads: bool | None = None
    """Whether to apply weight decay also to layers whose trust ratio is undefined; null leaves this
    to the variant."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""
        return lars(rate, **self.settings(LARS_RULES[self.variant], tree))
