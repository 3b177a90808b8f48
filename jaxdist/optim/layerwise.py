"""The common part of LAMB and LARS: state, masks and layers, but not the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.optim.layers import LayeredLeaf, StepCount, describe_layers, wide_zeros
from jaxdist.optim.trust_ratio import Mask, flags, need_params
from jaxdist.types import OptState, Params, PyTree, Scalar, Specs, Updates

Leaves = Sequence[jax.Array]


class LayerwiseRule(Protocol):
    """The fields that `LambRule` and `LarsRule` share; `LambRule` describes each field."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def decay_vectors(self) -> bool: ...
    @property
    def adapt_vectors(self) -> bool: ...
    @property
    def adapt_undecayed(self) -> bool: ...


AnyRule = TypeVar("AnyRule", bound=LayerwiseRule)
VariantT = TypeVar("VariantT", bound=str)


def choose_rule(
    optimizer: str,
    rules: Mapping[VariantT, AnyRule],
    variant: VariantT,
    options: Mapping[str, object],
) -> AnyRule:
    """Return the rule of a variant, with some fields replaced.

    Args:
      optimizer: the name of the optimizer, for errors.
      rules: the rule of each variant.
      options: the values of the fields to replace.

    Raises:
      ConfigError: the variant or an option does not exist.
    """
    if variant not in rules:
        raise ConfigError(f"{optimizer}: variant {variant!r}: {did_you_mean(variant, rules)}")
    rule = rules[variant]
    known = [field.name for field in fields(rule)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{optimizer} has no option {name!r}: {did_you_mean(name, known)}")
    return replace(rule, **options)


class RuleInputs(NamedTuple):
    """The inputs of a step, with lists in the order of the leaves; `count` includes this step."""

    params: Leaves
    grads: Leaves
    moments: Sequence[Leaves]
    leaves: Sequence[LayeredLeaf]
    decay: Sequence[float]
    adapts: Sequence[bool]
    count: StepCount
    rate: Scalar

    @property
    def adapting(self) -> list[int]:
        """The positions of the leaves to which the trust ratio applies."""
        return [i for i, flag in enumerate(self.adapts) if flag]


def layerwise(
    step: Callable[[RuleInputs], tuple[Leaves, ...]],
    state_type: type[OptState],
    rule: LayerwiseRule,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    layer_dims: PyTree,
    decay_mask: Mask | None,
    adapt_mask: Mask | None,
    specs: Specs,
    begin: Callable[[Params], Sequence[Params]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Build an optimizer from a step that scales each layer of each leaf by norms of that layer.

    Args:
      step: a function that returns the updates and the new moments, each in the order of the
        leaves.
      state_type: the type of the state: a named tuple of `count` and of moments, which are trees
        with the structure of the parameters.
      layer_dims: for each parameter, the names of the dims that count layers, and None for its
        other dims: `{"w1": ["layers", None, None], "head": None}`; see
        `jaxdist.optim.layers.describe_layers`.
      specs: the partition specs for `jaxdist.optim.layers.describe_layers`. Inside `jax.shard_map`
        one all-reduce completes all norms.
      decay_mask: a mask that is true where weights decay. None leaves this to the rule, which may
        exclude tensors with fewer than two dims other than the layers.
      adapt_mask: a mask that is true where the trust ratio applies. None leaves this to the rule.
      begin: a function that returns the first moments, or None for zeros like the parameters.
    """

    def init(params: Params) -> OptState:
        zeros = (jax.tree.map(wide_zeros, params) for _ in state_type._fields[1:])
        moments = zeros if begin is None else begin(params)
        return state_type(jnp.zeros((), jnp.int32), *moments)

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        del extra
        assert isinstance(state, state_type)
        leaves = describe_layers(need_params(params), layer_dims, specs)
        p, structure = jax.tree.flatten(params)
        g, *moments = map(structure.flatten_up_to, (updates, *state[1:]))
        chosen = _decays_and_adapts(rule, weight_decay, params, leaves, decay_mask, adapt_mask)
        # Bias correction counts steps from 1, and a schedule counts steps from 0.
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        now = RuleInputs(p, g, moments, leaves, *chosen, count, rate)
        moves, *moments = map(structure.unflatten, step(now))
        return moves, state_type(count, *moments)

    return optax.GradientTransformationExtraArgs(init, update)


def _decays_and_adapts(
    rule: LayerwiseRule,
    weight_decay: float,
    params: Params,
    leaves: Sequence[LayeredLeaf],
    decay_mask: Mask | None,
    adapt_mask: Mask | None,
) -> tuple[list[float], list[bool]]:
    """Return each leaf's rate of weight decay, and whether the trust ratio applies to the leaf."""

    def chosen(mask: Mask | None, name: str, vectors: bool) -> list[bool]:
        if mask is not None:
            return flags(mask, params, name)
        return [vectors or len(leaf.summed) >= 2 for leaf in leaves]

    decaying = chosen(decay_mask, "decay_mask", rule.decay_vectors)
    decays = [weight_decay if flag else 0.0 for flag in decaying]
    adapts = chosen(adapt_mask, "adapt_mask", rule.adapt_vectors)
    if not rule.adapt_undecayed:
        adapts = [flag and decay != 0 for flag, decay in zip(adapts, decays, strict=True)]
    return decays, adapts
