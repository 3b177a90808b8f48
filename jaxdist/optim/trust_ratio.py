"""The layer-wise trust ratio: how far a layer may move, as a fraction of its own norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import ConfigError, did_you_mean
from jaxdist.optim.layers import Leaf, add_shards, describe, whole
from jaxdist.trees import flatten_with_names

Bounds = tuple[float, float]
UNBOUNDED: Bounds = (0.0, math.inf)
Mask = bool | Any | Callable[[Any], Any]
"""True or False for all, a tree (or prefix) of bools, or a function of the parameters to one."""


class Norms(NamedTuple):
    """l2 norms of a leaf's weights and of their update; float32, one a layer."""

    weight: jax.Array
    update: jax.Array


def layer_norms(
    pairs: Sequence[tuple[jax.Array, jax.Array]], leaves: Sequence[Leaf]
) -> list[Norms]:
    """Norms of (weight, update) of each leaf, one a layer, exact over shards.

    Cost: one all-reduce for the tree (see `add_shards`), none where no leaf is split.
    """
    return norms_of([leaf.squares(*pair) for leaf, pair in zip(leaves, pairs, strict=True)], leaves)


def norms_of(squares: Sequence[tuple[jax.Array, ...]], leaves: Sequence[Leaf]) -> list[Norms]:
    """Norms from this device's sums of squares."""
    return [Norms(*map(jnp.sqrt, pair)) for pair in add_shards(squares, leaves)]


def clip_global_norm(
    grads: Sequence[jax.Array], leaves: Sequence[Leaf], max_norm: float
) -> list[jax.Array]:
    """The gradients, scaled down to a global norm when theirs is larger; one all-reduce at most."""
    if max_norm == math.inf or not grads:
        return list(grads)
    one = [whole(leaf) for leaf in leaves]
    squares = add_shards([leaf.squares(g) for leaf, g in zip(one, grads, strict=True)], one)
    norm = jnp.sqrt(sum((jnp.sum(pair[0]) for pair in squares), jnp.float32(0)))
    scale = 1 / jnp.maximum(norm / max_norm, 1.0)
    return [g * scale.astype(g.dtype) for g in grads]


def usable(norms: Norms) -> jax.Array:
    """Where a ratio means something: both norms positive and finite in float32."""
    weight, update = norms
    return (weight > 0) & (weight < jnp.inf) & (update > 0) & (update < jnp.inf)


def trust_ratio(
    norms: Norms,
    *,
    phi: Bounds = UNBOUNDED,
    ratio_bounds: Bounds = UNBOUNDED,
    coefficient: float = 1.0,
    eps: float | jax.Array = 0.0,
) -> jax.Array:
    """coefficient * clip(||w||, phi) / (||u|| + eps), clipped to `ratio_bounds`; float32.

    1 where a norm is zero or not finite. Squares are summed in float32, so that a norm below 1e-19
    or above 1e19 counts as zero or infinite.

    >>> float(trust_ratio(Norms(jnp.float32(6), jnp.float32(3))))
    2.0
    >>> float(trust_ratio(Norms(jnp.float32(0), jnp.float32(3)), ratio_bounds=(0.01, 0.3)))
    1.0
    """
    fine = usable(norms)
    ratio = coefficient * jnp.clip(norms.weight, *phi) / (jnp.where(fine, norms.update, 1.0) + eps)
    return jnp.where(fine, jnp.clip(ratio, *ratio_bounds), 1.0)


def scale_by_layerwise_trust_ratio(
    *,
    layer_dims: Any = None,
    mask: Mask = True,
    specs: Any = None,
    phi: Bounds = UNBOUNDED,
    ratio_bounds: Bounds = UNBOUNDED,
    coefficient: float = 1.0,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Graft the trust ratio on any base: each layer's update times ||w|| / ||update||.

    Args:
      layer_dims: leading dims that are layers: a count for all leaves, or a tree of counts or of
        tuples of positions (`jaxdist.optim.layers.layer_dims` makes one from logical dims).
      mask: true where the ratio applies; elsewhere the update passes as it is.
      specs: partition specs of the parameters, for use inside `jax.shard_map`.

    Raises:
      ConfigError: no params, bad numbers, dims, axes or masks.

    >>> tx = optax.chain(optax.scale_by_rms(), scale_by_layerwise_trust_ratio(), optax.scale(-0.1))
    >>> w = {"kernel": jnp.full((3, 4), 2.0)}
    >>> update, _ = tx.update({"kernel": jnp.ones((3, 4))}, tx.init(w), w)
    >>> round(float(update["kernel"][0, 0]), 3)
    -0.2
    """
    check_bounds(phi=phi, ratio_bounds=ratio_bounds)
    check_numbers(coefficient=coefficient, eps=eps)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del extra
        leaves = describe(need_params(params), layer_dims, specs)
        weights, structure = jax.tree.flatten(params)
        moves = structure.flatten_up_to(updates)
        on = [i for i, flag in enumerate(flags(mask, params, "mask")) if flag]
        norms = layer_norms([(weights[i], moves[i]) for i in on], [leaves[i] for i in on])
        for i, pair in zip(on, norms, strict=True):
            ratio = trust_ratio(
                pair, phi=phi, ratio_bounds=ratio_bounds, coefficient=coefficient, eps=eps
            )
            moves[i] = (moves[i] * ratio).astype(moves[i].dtype)
        return structure.unflatten(moves), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def need_params(params: Any) -> Any:
    """The parameters that the ratio is about.

    Raises:
      ConfigError: they were not given.
    """
    if params is None:
        raise ConfigError(
            "the trust ratio needs the parameters: call update(grads, state, params), not "
            "update(grads, state)"
        )
    return params


def flags(mask: Mask, params: Any, name: str) -> list[bool]:
    """A mask as one bool a leaf.

    Raises:
      ConfigError: a mask of another structure, or one that is false everywhere.
    """
    if isinstance(mask, bool):
        return [mask] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    try:
        found = jax.tree.leaves(jax.tree.broadcast(tree, params))
    except ValueError as error:
        raise ConfigError(f"{name} does not fit the parameters: {error}") from error
    if found and not any(found):
        names = ", ".join(leaf for leaf, _ in flatten_with_names(params))
        raise ConfigError(
            f"{name} matches none of the {len(found)} parameters ({names}); pass False to switch "
            "it off"
        )
    return [bool(flag) for flag in found]


def check_numbers(**values: Any) -> None:
    """Hyper-parameters must be numbers from 0; schedules and traced values are let through.

    Raises:
      ConfigError: NaN, infinite or negative.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ConfigError(f"{name} = {value}: must be a finite number, 0 or more")


def check_betas(**values: Any) -> None:
    """Decays of moments must lie in [0, 1).

    Raises:
      ConfigError: they do not.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 0 and less than 1")


def check_bounds(**values: Bounds) -> None:
    """Bounds are (lower, upper) with 0 <= lower <= upper; an infinite upper bound is none.

    Raises:
      ConfigError: they are not.
    """
    for name, (low, high) in values.items():
        if not 0 <= low <= high or low == math.inf:
            raise ConfigError(f"{name} = ({low}, {high}): need 0 <= lower <= upper")


class Rule(Protocol):
    """What the rules of LAMB and LARS have in common: see `LambRule`."""

    @property
    def decay_vectors(self) -> bool: ...
    @property
    def adapt_vectors(self) -> bool: ...
    @property
    def adapt_undecayed(self) -> bool: ...


def decays_and_adapts(
    rule: Rule,
    params: Any,
    leaves: Sequence[Leaf],
    weight_decay: float,
    *,
    decay_mask: Mask | None,
    adapt_mask: Mask | None,
) -> tuple[list[float], list[bool]]:
    """For each leaf its rate of decay and whether the ratio applies."""
    matrices = [len(leaf.summed) >= 2 for leaf in leaves]

    def chosen(mask: Mask | None, name: str, vectors: bool) -> list[bool]:
        if mask is not None:
            return flags(mask, params, name)
        return [vectors or matrix for matrix in matrices]

    decays = [
        weight_decay if flag else 0.0
        for flag in chosen(decay_mask, "decay_mask", rule.decay_vectors)
    ]
    adapts = chosen(adapt_mask, "adapt_mask", rule.adapt_vectors)
    if not rule.adapt_undecayed:
        adapts = [flag and decay != 0 for flag, decay in zip(adapts, decays, strict=True)]
    return decays, adapts


AnyRule = TypeVar("AnyRule", bound=Rule)


def choose_rule(
    optimizer: str, rules: Mapping[Any, AnyRule], variant: str, options: Mapping[str, Any]
) -> AnyRule:
    """The rule of a variant with some of its options replaced.

    Raises:
      ConfigError: no such variant or option.
    """
    if variant not in rules:
        raise ConfigError(f"{optimizer}: variant {variant!r}: {did_you_mean(variant, rules)}")
    rule: Any = rules[variant]
    known = [field.name for field in fields(rule)]
    for name in options:
        if name not in known:
            raise ConfigError(f"{optimizer} has no option {name!r}: {did_you_mean(name, known)}")
    return replace(rule, **options)
