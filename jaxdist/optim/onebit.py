"""Optimizers whose momentum is compressed: the variance is frozen before it is.

What is sent is no part of them: gradients come as `CompressedMomentum` gives them, which stands for
the same momentum on all devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.schema import Count
from jaxdist.optim.common import Beta, NamedParams, OptimizerConfig
from jaxdist.optim.lamb import LambRule
from jaxdist.optim.layers import LayeredLeaf, StepCount, describe, wide_zeros
from jaxdist.optim.layerwise import decays_and_adapts
from jaxdist.optim.trust_ratio import Mask, layer_norms, need_params, trust_ratio, usable
from jaxdist.types import OptState, Params, PyTree, Updates


class FrozenAdamState(NamedTuple):
    """Steps taken, and the moments: trees like the parameters, float32 or wider."""

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
) -> optax.GradientTransformation:
    """Adam's direction, its second moment frozen after `freeze_step` steps.

    1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1, which corrects no bias).
    """

    def init(params: Params) -> OptState:
        mu, nu = (jax.tree.map(wide_zeros, params) for _ in range(2))
        return FrozenAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        updates: Updates, state: OptState, params: Params = None
    ) -> tuple[Updates, OptState]:
        count: PyTree = optax.safe_increment(state.count)
        mu = jax.tree.map(partial(_mean, b1), state.mu, updates)
        nu = jax.tree.map(partial(_square, b2, count <= freeze_step), state.nu, updates)
        seen = jnp.minimum(count, freeze_step)
        one = 1 - b1**count if bias_correction else 1.0
        two = 1 - b2**seen if bias_correction else 1.0

        def direction(m: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            return ((m / one) / (jnp.sqrt(v / two) + eps)).astype(g.dtype)

        return jax.tree.map(direction, mu, nu, updates), FrozenAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _mean(b1: float, m: jax.Array, g: jax.Array) -> jax.Array:
    return b1 * m + (1 - b1) * g.astype(m.dtype)


def _square(b2: float, moves: PyTree, v: jax.Array, g: jax.Array) -> jax.Array:
    return jnp.where(moves, b2 * v + (1 - b2) * jnp.square(g.astype(v.dtype)), v)


@dataclass(frozen=True)
class OnebitLambRule:
    """The numbers of 1-bit LAMB.

    Attributes:
      freeze_step: steps of plain LAMB.
      coefficient_decay: of the mean of trust ratios that is kept over them (the paper's beta 3).
      ratio_bounds: of these ratios.
      factor_bounds: of what the mean is multiplied by afterwards.
      factor_change: how far this factor may move in one step, as a share of it.
    """

    freeze_step: int
    coefficient_decay: float = 0.9
    ratio_bounds: tuple[float, float] = (0.01, 10.0)
    factor_bounds: tuple[float, float] = (0.5, 4.0)
    factor_change: float = 0.1


class OnebitLambState(NamedTuple):
    """Of `onebit_lamb`.

    Attributes:
      count: steps taken.
      mu, nu: the moments; nu is frozen after the warm-up.
      fresh: the second moment that goes on.
      coefficient: mean trust ratio of the warm-up, a number for each layer of each parameter.
      factor: that it was last multiplied by, alike.
    """

    count: StepCount
    mu: Updates
    nu: Updates
    fresh: Updates
    coefficient: Updates
    factor: Updates


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    rule: OnebitLambRule,
    layer_dims: PyTree = None,
    decay_mask: Mask | None = None,
    adapt_mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """1-bit LAMB (Li et al., arXiv 2104.06069, algorithm 1; no bias is corrected).

    After `rule.freeze_step` steps of LAMB each layer's ratio is its mean over them, times the
    largest quotient of frozen and fresh deviation in the layer.

    Args:
      layer_dims, decay_mask, adapt_mask: see `jaxdist.optim.layerwise.layerwise`.
    """
    step = _OnebitLamb(b1, b2, eps, rule)

    def init(params: Params) -> OptState:
        leaves, structure = describe(params, layer_dims), jax.tree.structure(params)
        pairs = zip(leaves, jax.tree.leaves(params), strict=True)
        ones = structure.unflatten([_of_layers(leaf, jnp.ones(x.shape)) for leaf, x in pairs])
        mu, nu, fresh = (jax.tree.map(wide_zeros, params) for _ in range(3))
        zeros = jax.tree.map(jnp.zeros_like, ones)
        return OnebitLambState(jnp.zeros((), jnp.int32), mu, nu, fresh, zeros, ones)

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        del extra
        leaves = describe(need_params(params), layer_dims)
        chosen = decays_and_adapts(LambRule(), weight_decay, params, leaves, decay_mask, adapt_mask)
        weights, structure = jax.tree.flatten(params)
        rows = zip(weights, *map(structure.flatten_up_to, (updates, *state[1:])), strict=True)
        rate: PyTree = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        found = [
            step.leaf(_Leaf(*row), leaf, decay, adapts, count)
            for row, leaf, decay, adapts in zip(rows, leaves, *chosen, strict=True)
        ]
        moves, *after = map(structure.unflatten, zip(*found, strict=True))
        scaled = jax.tree.map(lambda move, w: (-rate * move).astype(w.dtype), moves, params)
        return scaled, OnebitLambState(count, *after)

    return optax.GradientTransformationExtraArgs(init, update)


class _Leaf(NamedTuple):
    """A parameter, its gradient, and its part of the state."""

    p: jax.Array
    g: jax.Array
    mu: jax.Array
    nu: jax.Array
    fresh: jax.Array
    coefficient: jax.Array
    factor: jax.Array


@dataclass(frozen=True)
class _OnebitLamb:
    b1: float
    b2: float
    eps: float
    rule: OnebitLambRule

    def leaf(
        self, x: _Leaf, layered: LayeredLeaf, decay: float, adapts: bool, count: PyTree
    ) -> tuple[jax.Array, ...]:
        """What is subtracted, times the rate; and the leaf's next state."""
        warm = count <= self.rule.freeze_step
        mu, nu = _mean(self.b1, x.mu, x.g), _square(self.b2, warm, x.nu, x.g)
        fresh = _square(self.b2, jnp.bool_(True), x.fresh, x.g)
        adam = mu / (jnp.sqrt(nu) + self.eps)
        update = adam + decay * x.p
        if not adapts:
            return update, mu, nu, fresh, x.coefficient, x.factor
        (norms,) = layer_norms([(x.p, update)], [layered])
        ratio = trust_ratio(norms, ratio_bounds=self.rule.ratio_bounds)
        keep = self.rule.coefficient_decay
        coefficient = _like(layered, x.coefficient)
        mean = jnp.where(usable(norms), keep * coefficient + (1 - keep) * ratio, coefficient)
        quotient = (jnp.sqrt(nu) + self.eps) / (jnp.sqrt(fresh) + self.eps)
        largest = _like(layered, _of_layers(layered, quotient))
        (of_adam,) = layer_norms([(x.p, adam)], [layered])
        share = jnp.minimum(1.0, of_adam.update / jnp.maximum(norms.update, jnp.finfo("f4").tiny))
        last = _like(layered, x.factor)
        factor = self._bounded(largest * share + (1 - share) if decay else largest, last)
        scale = jnp.where(warm, ratio, coefficient * factor)
        kept = jnp.where(warm, mean, coefficient), jnp.where(warm, last, factor)
        return scale * update, mu, nu, fresh, *(jnp.squeeze(k, layered.summed) for k in kept)

    def _bounded(self, factor: jax.Array, last: jax.Array) -> jax.Array:
        change = self.rule.factor_change
        factor = jnp.clip(factor, *self.rule.factor_bounds)
        return jnp.clip(factor, last * (1 - change), last * (1 + change))


def _of_layers(layered: LayeredLeaf, x: jax.Array) -> jax.Array:
    """The largest element of each layer."""
    return jnp.squeeze(jnp.max(x, axis=layered.summed, keepdims=True), layered.summed)


def _like(layered: LayeredLeaf, kept: jax.Array) -> jax.Array:
    """A number for each layer with the leaf's rank."""
    return jnp.expand_dims(kept, layered.summed)


class OnebitConfig(OptimizerConfig):
    """The settings that 1-bit optimizers have in common."""

    freeze_step: Count
    """Steps before the second moment is frozen: parallel.compression.warmup_steps."""
    b1: Beta = 0.9
    """Decay of the first moment: that of error_feedback compressed_momentum."""
    b2: Beta = 0.999
    """Decay of the second moment."""


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
        settings = {"freeze_step": self.freeze_step, "bias_correction": self.bias_correction}
        return optax.chain(
            scale_by_frozen_adam(self.b1, self.b2, self.eps, **settings),
            optax.add_decayed_weights(self.weight_decay, tree.matrices),
            optax.scale_by_learning_rate(rate),
        )


class OnebitLambConfig(OnebitConfig):
    """1-bit LAMB (Li et al., arXiv 2104.06069)."""

    type: Literal["onebit_lamb"]
    """Selects this optimizer."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decay of weights, inside the direction that the ratio scales."""
    layer_dims: tuple[str, ...] = ("layers",)
    """Dims whose every index has a ratio of its own, by name, where a parameter has them."""
    coefficient_decay: Beta = 0.9
    """Of the mean of trust ratios over the warm-up."""
    ratio_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.01, 10.0)
    """Bounds of these ratios."""
    factor_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.5, 4.0)
    """Bounds of what the mean is multiplied by afterwards."""
    factor_change: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """How far this factor may move in one step, as a share of it."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """The update rule for a learning-rate schedule on these parameters."""
        names = OnebitLambRule.__dataclass_fields__
        return onebit_lamb(
            rate,
            self.b1,
            self.b2,
            self.eps,
            self.weight_decay,
            rule=OnebitLambRule(**{name: getattr(self, name) for name in names}),
            layer_dims=tree.layer_dims(self.layer_dims),
            **tree.masks(LambRule(), None),
        )
