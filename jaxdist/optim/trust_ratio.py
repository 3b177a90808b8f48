"""The trust ratio, which scales the update of each layer to the norm of the layer's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import ConfigError
from jaxdist.optim.layers import LayeredLeaf, add_shards, describe_layers, single_norm
from jaxdist.trees import flatten_with_names
from jaxdist.types import Masks, OptState, Params, PyTree, Specs, Updates

Bounds = tuple[float, float]
UNBOUNDED: Bounds = (0.0, math.inf)
Mask = bool | Masks | Callable[[Params], Masks]
"""A bool for all leaves, a tree (or prefix of a tree) of bools, or a function from the parameters
to such a tree."""


class NormPair(NamedTuple):
    """The L2 norms of the weights and of the update of each layer in a leaf, in float32."""

    weight: jax.Array
    update: jax.Array


def layer_norms(
    pairs: Sequence[tuple[jax.Array, jax.Array]], leaves: Sequence[LayeredLeaf]
) -> list[NormPair]:
    """Return the norms of the weights and of the update for each layer of each leaf.

    The norms include the shards on other devices. The cost is one all-reduce for all leaves
    (`add_shards`), or none if no leaf is split.

    Args:
      pairs: the weights and the update of each leaf.
    """
    return norms_of([leaf.squares(*pair) for leaf, pair in zip(leaves, pairs, strict=True)], leaves)


def norms_of(
    squares: Sequence[tuple[jax.Array, ...]], leaves: Sequence[LayeredLeaf]
) -> list[NormPair]:
    """Return the result of `layer_norms`, given this device's sums of squares.

    Args:
      squares: the sums of the squares of the weights and of the update, for each leaf.
    """
    return [NormPair(*map(jnp.sqrt, pair)) for pair in add_shards(squares, leaves)]


def clip_global_norm(
    grads: Sequence[jax.Array], leaves: Sequence[LayeredLeaf], max_norm: float
) -> list[jax.Array]:
    """Scale the gradients down to the global norm `max_norm` if their norm is larger.

    The cost is at most one all-reduce.
    """
    if max_norm == math.inf or not grads:
        return list(grads)
    one = [single_norm(leaf) for leaf in leaves]
    squares = add_shards([leaf.squares(g) for leaf, g in zip(one, grads, strict=True)], one)
    norm = jnp.sqrt(sum((jnp.sum(pair[0]) for pair in squares), jnp.float32(0)))
    # The form min(1, max_norm / norm) would divide by zero where all gradients are zero.
    scale = 1 / jnp.maximum(norm / max_norm, 1.0)
    return [g * scale.astype(g.dtype) for g in grads]


def usable(norms: NormPair) -> jax.Array:
    """Return for each layer whether its ratio is defined: both norms are positive and finite."""
    weight, update = norms
    return (weight > 0) & (weight < jnp.inf) & (update > 0) & (update < jnp.inf)


def trust_ratio(
    norms: NormPair,
    *,
    phi: Bounds = UNBOUNDED,
    ratio_bounds: Bounds = UNBOUNDED,
    coefficient: float = 1.0,
    eps: float | jax.Array = 0.0,
) -> jax.Array:
    """Return coefficient * clip(||w||, phi) / (||u|| + eps), clipped to `ratio_bounds`.

    Here w are the weights of a layer, and u is the update. The ratio is 1 where a norm is zero or
    not finite. Squares are summed in float32, so a norm below 1e-19 or above 1e19 counts as zero or
    infinite.

    >>> float(trust_ratio(NormPair(jnp.float32(6), jnp.float32(3))))
    2.0
    >>> float(trust_ratio(NormPair(jnp.float32(0), jnp.float32(3)), ratio_bounds=(0.01, 0.3)))
    1.0
    """
    fine = usable(norms)
    # The inner `where` avoids 0 / 0. The outer `where` would drop the NaN, but `jax_debug_nans`
    # would still report it.
    ratio = coefficient * jnp.clip(norms.weight, *phi) / (jnp.where(fine, norms.update, 1.0) + eps)
    return jnp.where(fine, jnp.clip(ratio, *ratio_bounds), 1.0)


def scale_by_layerwise_trust_ratio(
    *,
    layer_dims: PyTree = None,
    mask: Mask = True,
    specs: Specs = None,
    phi: Bounds = UNBOUNDED,
    ratio_bounds: Bounds = UNBOUNDED,
    coefficient: float = 1.0,
    eps: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Build a transformation that scales each layer's update to the norm of the layer's weights.

    In an `optax.chain` this transformation follows any base transformation.

    Args:
      layer_dims, specs: the arguments of `jaxdist.optim.layers.describe_layers`.
      mask: a mask that is true where the ratio applies; other updates are unchanged.
      phi, ratio_bounds, coefficient, eps: the arguments of `trust_ratio`.

    Raises:
      ConfigError: an update lacks the parameters, or a number, dim, axis or mask is invalid.

    >>> tx = optax.chain(optax.scale_by_rms(), scale_by_layerwise_trust_ratio(), optax.scale(-0.1))
    >>> w = {"kernel": jnp.full((3, 4), 2.0)}
    >>> update, _ = tx.update({"kernel": jnp.ones((3, 4))}, tx.init(w), w)
    >>> round(float(update["kernel"][0, 0]), 3)
    -0.2
    """
    check_bounds(phi=phi, ratio_bounds=ratio_bounds)
    check_numbers(coefficient=coefficient, eps=eps)

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        del extra
        leaves = describe_layers(need_params(params), layer_dims, specs)
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


def need_params(params: Params) -> Params:
    """Return the parameters, which the trust ratio needs.

    Raises:
      ConfigError: the parameters were not passed.
    """
    if params is None:
        raise ConfigError(
            "the trust ratio needs the parameters: call update(grads, state, params), not "
            "update(grads, state)"
        )
    return params


def flags(mask: Mask, params: Params, name: str) -> list[bool]:
    """Expand a mask to a list with a bool for each leaf.

    Args:
      name: the name of the mask, for errors.

    Raises:
      ConfigError: the mask is a tree whose structure differs from the parameters, or a tree that is
        false everywhere.
    """
    if isinstance(mask, bool):
        return [mask] * len(jax.tree.leaves(params))
    tree = mask(params) if callable(mask) else mask
    try:
        found = jax.tree.leaves(jax.tree.broadcast(tree, params))
    except ValueError as error:
        raise ConfigError(
            f"{name} does not fit the parameters: pass a bool, or a tree of bools "
            f"with the structure of the parameters ({error})"
        ) from error
    if found and not any(found):
        names = ", ".join(leaf for leaf, _ in flatten_with_names(params))
        raise ConfigError(
            f"{name} matches none of the {len(found)} parameters ({names}); pass False to turn "
            f"{name} off"
        )
    return [bool(flag) for flag in found]


def check_numbers(**values: object) -> None:
    """Refuse numbers that are negative or not finite; schedules and traced values are not checked.

    Raises:
      ConfigError: a value is NaN, infinite or negative.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ConfigError(f"{name} = {value}: must be a finite number, 0 or more")


def check_betas(**values: object) -> None:
    """Refuse decays of moments outside of [0, 1).

    Raises:
      ConfigError: a decay is outside of [0, 1).
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 0 and less than 1")


def check_bounds(**values: Bounds) -> None:
    """Refuse bounds that violate 0 <= lower <= upper; the upper bound may be infinity.

    Raises:
      ConfigError: the bounds are invalid.
    """
    for name, (low, high) in values.items():
        if not 0 <= low <= high or low == math.inf:
            raise ConfigError(f"{name} = ({low}, {high}): need 0 <= lower <= upper")
