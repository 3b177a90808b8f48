"""1-bit LAMB, whose trust ratios after a warm-up follow the change of the second moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.errors import ConfigError
from jaxdist.experimental.onebit import (
    OnebitConfig,
    adam_bound,
    check_freeze_step,
    first_moment,
    frozen_direction,
    second_moment,
)
from jaxdist.optim.common import Beta, NamedParams
from jaxdist.optim.lamb import LambRule
from jaxdist.optim.layers import (
    LayeredLeaf,
    Squares,
    StepCount,
    add_shards,
    describe_layers,
    wide_zeros,
)
from jaxdist.optim.layerwise import Leaves, RuleInputs, layerwise
from jaxdist.optim.trust_ratio import (
    Bounds,
    Mask,
    NormPair,
    check_betas,
    check_bounds,
    check_numbers,
    trust_ratio,
    usable,
)
from jaxdist.types import Params, PyTree, Specs, Updates


@dataclass(frozen=True)
class OnebitLambRule:
    """The numeric settings of 1-bit LAMB.

    Attributes:
      freeze_step: the number of warm-up steps, in which the optimizer is plain LAMB.
      coefficient_decay: the decay of the running mean of a layer's trust ratios in the warm-up (the
        paper's beta 3). The mean starts at zero without bias correction, so that it approaches the
        ratios only if freeze_step is much larger than 1 / (1 - decay).
      ratio_bounds: the bounds of the trust ratios in the warm-up.
      factor_bounds: the bounds of the factor by which the mean ratio is multiplied after the
        warm-up.
      factor_change: the largest change of the factor in a step, as a fraction of the factor.
      bounded: whether an element moves at most as far as Adam could move it (`adam_bound`).

    Raises:
      ConfigError: freeze_step is below 1, or the bounds, the decay or the fraction are invalid.
    """

    freeze_step: int
    coefficient_decay: float = 0.9
    ratio_bounds: Bounds = (0.01, 10.0)
    factor_bounds: Bounds = (0.5, 4.0)
    factor_change: float = 0.1
    bounded: bool = True

    def __post_init__(self) -> None:
        check_freeze_step(self.freeze_step)
        check_betas(coefficient_decay=self.coefficient_decay)
        check_bounds(ratio_bounds=self.ratio_bounds, factor_bounds=self.factor_bounds)
        if not 0 < self.factor_change < 1:
            raise ConfigError(f"factor_change = {self.factor_change}: must be between 0 and 1")

    def ratio(
        self, norms: Squares, largest: jax.Array, kept: RunningNorms, warm: jax.Array
    ) -> _Ratio:
        """Return the scale of each layer's update, and the next running values.

        Args:
          norms: the norms of the weights, of the update, and of the update without weight decay.
          largest: the largest quotient of the roots of the frozen and the fresh second moment in
            each layer.
          kept: the running values before this step.
          warm: whether this step belongs to the warm-up.
        """
        weight, update, direction = norms
        pair = NormPair(weight, update)
        ratio = trust_ratio(pair, ratio_bounds=self.ratio_bounds)
        keep = self.coefficient_decay
        mean = keep * kept.coefficient + (1 - keep) * ratio
        coefficient = jnp.where(warm & usable(pair), mean, kept.coefficient)
        # The second moment affects only Adam's share of the update, so that the share of weight
        # decay is not multiplied. The smallest float avoids 0 / 0 in a layer without an update.
        share = jnp.minimum(1.0, direction / jnp.maximum(update, jnp.finfo("f4").tiny))
        factor = jnp.clip(largest * share + (1 - share), *self.factor_bounds)
        slower, faster = 1 - self.factor_change, 1 + self.factor_change
        factor = jnp.clip(factor, kept.factor * slower, kept.factor * faster)
        factor = jnp.where(warm, kept.factor, factor)
        return _Ratio(
            jnp.where(warm, ratio, coefficient * factor), RunningNorms(coefficient, factor)
        )


class RunningNorms(NamedTuple):
    """The running values of each layer of a parameter.

    Attributes:
      coefficient: the running mean of the trust ratios of the warm-up.
      factor: the factor by which the coefficient was multiplied in the last step.
    """

    coefficient: jax.Array
    factor: jax.Array


class _Ratio(NamedTuple):
    """The scale of the update of each layer in a leaf, and the running values after the step."""

    scale: jax.Array
    kept: RunningNorms


class OnebitLambState(NamedTuple):
    """The state of `onebit_lamb`.

    Attributes:
      count: the number of steps.
      mu, nu: the first and the second moment. The second moment is frozen after the warm-up.
      fresh: a second moment that is updated in every step.
      coefficient: the running mean of the trust ratios of the warm-up, for each layer.
      factor: the factor by which the coefficient was multiplied in the last step, for each layer.
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
    specs: Specs = None,
) -> optax.GradientTransformationExtraArgs:
    """Return 1-bit LAMB (Li et al., arXiv 2104.06069, algorithm 1), without bias correction.

    In the first `rule.freeze_step` steps, LAMB keeps a running mean of each layer's trust ratio.
    After these steps, the ratio is the product of the mean and a factor. The factor is the largest
    quotient of the roots of the frozen and the fresh second moment over the elements of the layer.
    An element whose gradient was zero in all of the first steps never moves: see
    `jaxdist.experimental.onebit.frozen_direction`.

    The state has three float32 numbers for each element. Inside `jax.shard_map` the norms of all
    parameters share an all-reduce, and each parameter whose layers are split needs another
    all-reduce.

    Args:
      learning_rate: the learning rate, or its schedule.
      b1, b2: the decays of the first and the second moment.
      eps: a small number that is added to the root of the second moment.
      weight_decay: the weight decay, which is part of the update that the trust ratio scales.
      rule: the other numeric settings.
      layer_dims, decay_mask, adapt_mask, specs: see `jaxdist.optim.layerwise.layerwise`.

    Raises:
      ConfigError: the numbers, dims, axes or masks are invalid, or an update is computed without
        params.
    """
    check_numbers(learning_rate=learning_rate, eps=eps, weight_decay=weight_decay)
    check_betas(b1=b1, b2=b2)
    most = adam_bound(b1, b2) if rule.bounded else math.inf

    def begin(params: Params) -> Sequence[Params]:
        leaves, structure = describe_layers(params, layer_dims), jax.tree.structure(params)
        pairs = zip(leaves, jax.tree.leaves(params), strict=True)
        shapes = [tuple(x.shape[i] for i in leaf.kept) for leaf, x in pairs]
        # The factor is 1 at first, and `factor_change` limits its changes.
        running = [structure.unflatten(map(made, shapes)) for made in (jnp.zeros, jnp.ones)]
        return [*(jax.tree.map(wide_zeros, params) for _ in range(3)), *running]

    step = partial(_step, b1=b1, b2=b2, eps=eps, most=most, rule=rule)
    by_leaf = (layer_dims, decay_mask, adapt_mask, specs)
    # As in the paper of LAMB, biases and norm scales neither decay nor adapt, unless the masks
    # select them.
    return layerwise(
        step, OnebitLambState, LambRule(), learning_rate, weight_decay, *by_leaf, begin
    )


def _step(
    now: RuleInputs, *, b1: float, b2: float, eps: float, most: float, rule: OnebitLambRule
) -> tuple[Leaves, ...]:
    """Return the updates, and the moments after the step, each in the order of the leaves."""
    warm: PyTree = now.count <= rule.freeze_step
    mu, nu, fresh, *kept = now.moments
    mu = list(map(partial(first_moment, b1), mu, now.grads))
    nu = list(map(partial(second_moment, b2, warm), nu, now.grads))
    fresh = list(map(partial(second_moment, b2, True), fresh, now.grads))
    rows = zip(now.params, mu, nu, fresh, now.decay, strict=True)
    tensors = [_Tensors.of(*row, eps=eps, most=most) for row in rows]
    ratios = _ratios(tensors, now, list(map(RunningNorms, *kept)), rule, warm)
    pairs = zip(tensors, ratios, strict=True)
    moves = [(-now.rate * ratio.scale * x.update).astype(x.p.dtype) for x, ratio in pairs]
    coefficient = [ratio.kept.coefficient for ratio in ratios]
    return moves, mu, nu, fresh, coefficient, [ratio.kept.factor for ratio in ratios]


class _Tensors(NamedTuple):
    """The tensors of a leaf from which its trust ratio and its update are computed.

    Attributes:
      p: the weights.
      update, direction: the update with and without weight decay.
      quotient: the quotient of the roots of the frozen and the fresh second moment.
    """

    p: jax.Array
    update: jax.Array
    direction: jax.Array
    quotient: jax.Array

    @classmethod
    def of(
        cls,
        p: jax.Array,
        m: jax.Array,
        v: jax.Array,
        fresh: jax.Array,
        decay: float,
        *,
        eps: float,
        most: float,
    ) -> _Tensors:
        direction = frozen_direction(m, v, eps, most)
        # An element that never moves must not determine the largest quotient of its layer.
        quotient = jnp.where(v > 0, (jnp.sqrt(v) + eps) / (jnp.sqrt(fresh) + eps), 0.0)
        return cls(p, direction + decay * p if decay else direction, direction, quotient)


def _ratios(
    tensors: Sequence[_Tensors],
    now: RuleInputs,
    kept: Sequence[RunningNorms],
    rule: OnebitLambRule,
    warm: jax.Array,
) -> list[_Ratio]:
    """Return the scale of each leaf's update, and the running values after the step.

    The scale of a leaf that does not adapt is 1.

    Args:
      tensors: the tensors of each leaf.
      now: the inputs of the step.
      kept: the running values before the step.
      rule: the numeric settings.
      warm: whether the step belongs to the warm-up.
    """
    found = [_Ratio(jnp.float32(1), x) for x in kept]
    on, leaves = now.adapting, now.leaves
    squares = [leaves[i].squares(*tensors[i][:3]) for i in on]
    for i, sums in zip(on, add_shards(squares, [leaves[i] for i in on]), strict=True):
        summed = leaves[i].summed
        wide = RunningNorms(*(jnp.expand_dims(x, summed) for x in kept[i]))
        largest = _largest(leaves[i], tensors[i].quotient)
        scale, after = rule.ratio(tuple(map(jnp.sqrt, sums)), largest, wide, warm)
        found[i] = _Ratio(scale, RunningNorms(*(jnp.squeeze(x, summed) for x in after)))
    return found


def _largest(leaf: LayeredLeaf, x: jax.Array) -> jax.Array:
    """Return the largest element of each layer, over all devices that have shards of the layer."""
    found = jnp.max(x, axis=leaf.summed, keepdims=True)
    return jax.lax.pmax(found, leaf.summed_axes) if leaf.summed_axes else found


class OnebitLambConfig(OnebitConfig):
    """1-bit LAMB (Li et al., arXiv 2104.06069)."""

    type: Literal["onebit_lamb"]
    """The name that selects this optimizer in a config."""
    eps: PositiveFloat = 1e-6
    """A small number that is added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """The weight decay, which is part of the update that the trust ratio scales."""
    layer_dims: tuple[str, ...] = ("layers",)
    """The names of dims of parameters. Each index along such a dim has a separate trust ratio."""
    coefficient_decay: Beta = 0.9
    """The decay of the running mean of trust ratios in the warm-up; the mean begins at zero."""
    ratio_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.01, 10.0)
    """The bounds of the trust ratios in the warm-up."""
    factor_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.5, 4.0)
    """The bounds of the factor by which the mean trust ratio is multiplied after the warm-up."""
    factor_change: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The largest change of the factor in a step, as a fraction of the factor."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Return the update rule for a schedule of the learning rate.

        Args:
          rate: the schedule.
          tree: the parameters to optimize.
        """
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
