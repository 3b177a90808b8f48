"""LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2), and its variants in other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import NonNegativeFloat, PositiveFloat

from jaxdist.errors import ConfigError
from jaxdist.optim.common import Beta, LayerwiseConfig, NamedParams
from jaxdist.optim.layers import Squares, StepCount
from jaxdist.optim.layerwise import Leaves, RuleInputs, choose_rule, layerwise
from jaxdist.optim.trust_ratio import (
    UNBOUNDED,
    Bounds,
    Mask,
    check_betas,
    check_bounds,
    check_numbers,
    clip_global_norm,
    norms_of,
    trust_ratio,
)
from jaxdist.types import PyTree, Scalar, Specs, Updates

LambVariant = Literal["paper", "optax", "apex", "deepspeed", "timm"]


@dataclass(frozen=True)
class LambRule:
    """The differences between implementations of LAMB.

    Attributes:
      bias_correction: whether the moments are divided by 1 - b^t, where b is the decay of the
        moment and t is the step.
      decay_in_ratio: whether weight decay is part of the direction that the trust ratio scales.
        Otherwise weight decay is added after the ratio.
      decay_vectors: whether biases and norm scales decay too, unless a mask excludes them.
      adapt_vectors: whether the trust ratio scales biases and norm scales too, unless a mask
        excludes them.
      adapt_undecayed: whether the trust ratio scales parameters without decay.
      max_grad_norm: the global norm to which larger gradients are first scaled down; infinity
        disables this.
      phi: the bounds of the norm of the weights in the trust ratio.
      ratio_bounds: the bounds of the trust ratio.
      nesterov: whether the direction uses Nesterov's momentum, as
        `optax.scale_by_adam(nesterov=True)` does.
    """

    bias_correction: bool = True
    decay_in_ratio: bool = True
    decay_vectors: bool = False
    adapt_vectors: bool = False
    adapt_undecayed: bool = True
    max_grad_norm: float = math.inf
    phi: Bounds = UNBOUNDED
    ratio_bounds: Bounds = UNBOUNDED
    nesterov: bool = False


LAMB_RULES: dict[LambVariant, LambRule] = {
    "paper": LambRule(),
    "optax": LambRule(decay_vectors=True, adapt_vectors=True),
    "apex": LambRule(adapt_vectors=True, adapt_undecayed=False, max_grad_norm=1.0),
    # DeepSpeed's recipe for BERT has these bounds.
    "deepspeed": LambRule(adapt_vectors=True, ratio_bounds=(0.01, 0.3)),
    "timm": LambRule(adapt_vectors=True, adapt_undecayed=False, max_grad_norm=1.0),
}


class LambState(NamedTuple):
    """The number of steps, and both moments as trees like the parameters, float32 or wider."""

    count: StepCount
    mu: Updates
    nu: Updates


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    variant: LambVariant = "paper",
    layer_dims: PyTree = None,
    decay_mask: Mask | None = None,
    adapt_mask: Mask | None = None,
    specs: Specs = None,
    **options: object,
) -> optax.GradientTransformationExtraArgs:
    """Build LAMB, which scales Adam's direction layer by layer to the norm of the weights.

    r = m^ / (sqrt(v^) + eps) + weight_decay w;  w <- w - learning_rate phi(||w||) / ||r|| r

    Here w are the weights, and m^ and v^ are Adam's moments after the correction of their bias.

    A step makes three passes over the tensors, for moments, norms and updates. If XLA fuses the
    step with `optax.apply_updates`, the step reads and writes 53 bytes for each float32 parameter,
    and needs temporaries of an eighth of one tensor.

    Args:
      variant: the implementation to follow; `options` override fields of its `LambRule`.
      layer_dims, decay_mask, adapt_mask, specs: the arguments of
        `jaxdist.optim.layerwise.layerwise`.

    Raises:
      ConfigError: an update lacks the parameters, or a number, dim, axis, mask or option is
        invalid.

    >>> tx = lamb(0.1, weight_decay=0.0)
    >>> w = {"kernel": jnp.full((2, 3), 2.0)}
    >>> update, _ = tx.update({"kernel": jnp.ones((2, 3))}, tx.init(w), w)
    >>> round(float(update["kernel"][0, 0]), 3)
    -0.2
    """
    check_numbers(learning_rate=learning_rate, eps=eps, weight_decay=weight_decay)
    check_betas(b1=b1, b2=b2)
    rule = lamb_rule(variant, **options)
    step = partial(_step, b1=b1, b2=b2, eps=eps, rule=rule)
    by_leaf = (layer_dims, decay_mask, adapt_mask, specs)
    return layerwise(step, LambState, rule, learning_rate, weight_decay, *by_leaf)


def _step(
    now: RuleInputs, *, b1: float, b2: float, eps: float, rule: LambRule
) -> tuple[Leaves, ...]:
    """Compute the updates of a step, and the moments after the step."""
    mu, nu = now.moments
    g = clip_global_norm(now.grads, now.leaves, rule.max_grad_norm)
    look = _Look.at(now.count, b1, b2, eps, rule)
    # Gradients are cast to the moments' dtype: a sum in bfloat16 would lose small gradients.
    mu = [b1 * m + (1 - b1) * x.astype(m.dtype) for m, x in zip(mu, g, strict=True)]
    nu = [b2 * v + (1 - b2) * jnp.square(x.astype(v.dtype)) for v, x in zip(nu, g, strict=True)]
    tensors = [_Tensors(*x) for x in zip(now.params, g, mu, nu, now.decay, strict=True)]
    ratios = _ratios(tensors, now, look, rule)
    pairs = zip(tensors, ratios, strict=True)
    return [look.update(x, now.rate, ratio, rule) for x, ratio in pairs], mu, nu


def lamb_rule(variant: LambVariant, **options: object) -> LambRule:
    """Return the rule of a variant, with some fields replaced.

    Raises:
      ConfigError: the variant or an option does not exist, or bounds are invalid.
    """
    rule = choose_rule("lamb", LAMB_RULES, variant, options)
    check_bounds(phi=rule.phi, ratio_bounds=rule.ratio_bounds)
    if not rule.max_grad_norm > 0:
        raise ConfigError(
            f"max_grad_norm = {rule.max_grad_norm}: must be above 0; inf turns clipping off"
        )
    return rule


class _Tensors(NamedTuple):
    """A leaf's weights, gradient, moments after this step, and rate of decay."""

    p: jax.Array
    g: jax.Array
    mu: jax.Array
    nu: jax.Array
    decay: float


class _Look(NamedTuple):
    """The scales of Adam's direction at a step.

    The direction is (mu_scale mu + g_scale g) / (sqrt(nu_scale nu) + eps), from the moments mu and
    nu and the gradient g.
    """

    mu_scale: jax.Array
    g_scale: jax.Array | None
    nu_scale: jax.Array
    eps: jax.Array

    @classmethod
    def at(cls, count: jax.Array, b1: float, b2: float, eps: float, rule: LambRule) -> _Look:
        """Return the scales of Adam's direction at step `count`, counted from 1."""
        step = count.astype(jnp.float32)

        def correction(b: float, s: jax.Array) -> jax.Array:
            if not rule.bias_correction:
                # The value is 1 in every step, but not a constant: XLA would simplify `direction`
                # and `update` by a constant, and keep the parts that they share in a temporary.
                return jnp.minimum(s, 1.0)
            # The direct form 1 - b^t would lose four of float32's seven digits at b = 0.999, t = 1.
            return -1 / jnp.expm1(s * (math.log(b) if b else -math.inf))

        one, two, ahead = correction(b1, step), correction(b2, step), correction(b1, step + 1)
        if rule.nesterov:
            return cls(b1 * ahead, (1 - b1) * one, two, jnp.float32(eps))
        return cls(one, None, two, jnp.float32(eps))

    def after(self, squares: Sequence[Squares]) -> _Look:
        """Return the same scales, with a dependency on the last of the sums `squares`.

        XLA then computes the leaves one after another, so that only the partial sums of a single
        leaf are in memory at a time.
        """
        if not squares:
            return self
        last = squares[-1][-1].ravel()[0]
        # A sum of squares is never negative, so the result is always eps, but XLA cannot know that
        # and keeps the dependency.
        return self._replace(eps=jnp.where(last < 0, last, self.eps))

    def numerator(self, x: _Tensors, scale: Scalar) -> jax.Array:
        """Return the numerator of Adam's direction, times `scale`."""
        moment = (self.mu_scale * scale) * x.mu
        return moment if self.g_scale is None else moment + (self.g_scale * scale) * x.g

    def direction(self, x: _Tensors, decay: Scalar) -> jax.Array:
        """Return Adam's direction, with weight decay unless `decay` is None.

        The trust ratio takes the norm of this direction.
        """
        adam = self.numerator(x, 1.0) / (jnp.sqrt(self.nu_scale * x.nu) + self.eps)
        return adam if decay is None else adam + decay * x.p

    def update(self, x: _Tensors, rate: Scalar, ratio: jax.Array, rule: LambRule) -> jax.Array:
        """Return -rate * ratio * direction, with weight decay, in the parameter's dtype."""
        # The quotient is written differently from `direction`: if both were the same expression,
        # XLA would compute it once and keep it, in a temporary as large as the tensor.
        scale, root = rate * ratio, jnp.sqrt(self.nu_scale)
        adam = self.numerator(x, scale / root) / (jnp.sqrt(x.nu) + self.eps / root)
        shrink = (scale if rule.decay_in_ratio else rate) * x.decay
        # Without decay the term is left out. A product with 0 would read the parameters.
        return -(adam + shrink * x.p if x.decay else adam).astype(x.p.dtype)


def _ratios(
    tensors: Sequence[_Tensors], now: RuleInputs, look: _Look, rule: LambRule
) -> list[jax.Array]:
    """Return the trust ratio of each layer of each leaf; it is 1 where the ratio does not apply."""
    squares: list[Squares] = []
    for i in now.adapting:
        x = tensors[i]
        decay = x.decay if x.decay and rule.decay_in_ratio else None
        # The barrier gives each leaf separate scalars. XLA:CPU would broadcast a shared scalar once
        # for all leaves of a shape, into a temporary as large as a leaf.
        own, decay = jax.lax.optimization_barrier(
            (look.after(squares), jax.tree.map(jnp.float32, decay))
        )
        squares.append(now.leaves[i].squares_in_one_pass(x.p, own.direction(x, decay)))
    ratios = [jnp.ones((1,) * leaf.ndim, jnp.float32) for leaf in now.leaves]
    norms_on = norms_of(squares, [now.leaves[i] for i in now.adapting])
    for i, norms in zip(now.adapting, norms_on, strict=True):
        ratios[i] = trust_ratio(norms, phi=rule.phi, ratio_bounds=rule.ratio_bounds)
    return ratios


class LambConfig(LayerwiseConfig):
    """LAMB (You et al., arXiv 1904.00962): Adam with a trust ratio per layer, for large batches."""

    type: Literal["lamb"]
    """The name that selects this optimizer in a config."""
    variant: LambVariant = "paper"
    """The implementation to follow, which gives the values of the settings that are null."""
    b1: Beta = 0.9
    """The decay of the first moment, which is the running mean of gradients."""
    b2: Beta = 0.999
    """The decay of the second moment, which is the running mean of squared gradients."""
    eps: PositiveFloat = 1e-6
    """A small number that is added to the square root of the second moment, so that no update
    divides by zero."""
    weight_decay: NonNegativeFloat = 0.01
    """The weight decay; decay_in_ratio determines whether the trust ratio scales the decay too."""
    bias_correction: bool | None = None
    """Whether to divide the moments by 1 - b^t in step t, since they start at zero; null leaves
    this to the variant."""
    decay_in_ratio: bool | None = None
    """Whether to include weight decay in the direction that the trust ratio scales. false adds the
    decay after the ratio, and null leaves this to the variant."""
    max_grad_norm: PositiveFloat | Literal["off"] | None = None
    """The global norm to which larger gradients are scaled down before they enter the moments, or
    `off`; null leaves this to the variant."""
    phi: tuple[NonNegativeFloat, NonNegativeFloat] | Literal["off"] | None = None
    """The bounds of the norm of the weights in the trust ratio, or `off`; null leaves them to the
    variant."""
    ratio_bounds: tuple[NonNegativeFloat, NonNegativeFloat] | Literal["off"] | None = None
    """The bounds of the trust ratio itself, or `off`; null leaves them to the variant."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""
        return lamb(rate, **self.settings(LAMB_RULES[self.variant], tree))
