"""Training with two bytes per number: master weights, bfloat16 moments, stochastic rounding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jaxdist.errors import ConfigError
from jaxdist.optim.owners import owners
from jaxdist.types import OptState, Params, Scalar, Updates

NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to bfloat16, up or down at random, so that the mean of the result is `x`.

    The result is one of the two neighboring values in bfloat16; the probability of the upper value
    is (x - lower) / (upper - lower). Representable values, NaN and infinities do not change. Values
    beyond the largest bfloat16 are rounded to the largest bfloat16. Cost: 16 random bits for each
    element.

    >>> stochastic_round(jnp.float32([1.5, -2.0, jnp.inf]), jax.random.key(0)).tolist()
    [1.5, -2.0, inf]
    """
    assert x.dtype == jnp.float32, f"stochastic_round takes float32, not {x.dtype}"
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)

    def upper_half(word: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type((word >> 16).astype(jnp.uint16), jnp.bfloat16)

    # Positive floats are ordered like their bits, so a carry out of the lower half gives the next
    # larger magnitude.
    rounded, cut = upper_half(bits + noise), upper_half(bits)
    rounded = jnp.where(jnp.isfinite(rounded), rounded, cut)
    # Noise in the low bits could change a NaN to an infinity or a zero, so values that are not
    # finite are only cast.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


class MomentsState(NamedTuple):
    """The inner state with bfloat16 moments, and the number of steps (int32), which seeds noise."""

    inner: OptState
    step: Scalar


def bf16_moments(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that its float32 moments are stored in bfloat16, by stochastic rounding.

    Moments are the leaves of the state that belong to a parameter. With b2 = 0.999 a second moment
    decreases by at most 1/1000 of its value in a step. Neighboring bfloat16 values differ by about
    1/256 of their value, so rounding to nearest would always undo such a change. Inside
    `jax.shard_map` all shards of a tensor draw the same noise, and the rounding of each shard is
    unbiased.

    Raises:
      ConfigError: `inner` holds master weights, which must stay float32; `master_weights` must be
        the outer wrapper.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> MomentsState:
        state = inner.init(params)
        if _holds_master(state):
            raise ConfigError(
                "bf16_moments(master_weights(...)) would round the master weights; nest them as "
                "master_weights(bf16_moments(...))"
            )
        first = _narrowed(state, params, jax.random.key(seed))
        return MomentsState(first, jnp.zeros((), jnp.int32))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        step = optax.safe_increment(state.step)
        moves, moved = inner.update(updates, _widened(state.inner, updates), params, **extra)
        key = jax.random.fold_in(jax.random.key(seed), step)
        return moves, MomentsState(_narrowed(moved, updates, key), step)

    return optax.GradientTransformationExtraArgs(init, update)


def _are_moments(state: OptState, like: Params) -> list[bool]:
    """Return, for each leaf of an inner state, whether the leaf is a moment.

    Args:
      like: a tree like the parameters.
    """
    leaves, structure = jax.tree.flatten(state)
    found = structure.flatten_up_to(owners(state, like))
    return [
        owner is not None and leaf.dtype in (jnp.float32, jnp.bfloat16)
        for leaf, owner in zip(leaves, found, strict=True)
    ]


def _narrowed(state: OptState, like: Params, key: jax.Array) -> OptState:
    leaves, structure = jax.tree.flatten(state)
    for i, moment in enumerate(_are_moments(state, like)):
        if moment and leaves[i].dtype == jnp.float32:
            # Each leaf has a separate key: with equal noise, the rounding errors of the leaves
            # would be correlated.
            leaves[i] = stochastic_round(leaves[i], jax.random.fold_in(key, i))
    return jax.tree.unflatten(structure, leaves)


def _widened(state: OptState, like: Params) -> OptState:
    leaves, structure = jax.tree.flatten(state)
    wide = [
        leaf.astype(jnp.float32) if moment else leaf
        for leaf, moment in zip(leaves, _are_moments(state, like), strict=True)
    ]
    return jax.tree.unflatten(structure, wide)


class MasterState(NamedTuple):
    """The float32 parameters, and the state of the inner transformation, which updates them."""

    master: Params
    inner: OptState


def _is_master(node: object) -> bool:
    return isinstance(node, MasterState)


def _holds_master(state: OptState) -> bool:
    return any(map(_is_master, jax.tree.leaves(state, is_leaf=_is_master)))


def _rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round float32 values to the nearest value of `dtype`, and return them as float32.

    XLA may remove a plain cast to `dtype` and back, since it allows excess precision.
    """
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def master_weights(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.bfloat16
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that it updates float32 master weights, for a model with narrow parameters.

    The state holds the master weights. The parameters, of `dtype`, equal the master weights rounded
    to nearest. If they are exactly equal before a step, they are exactly equal after
    `optax.apply_updates` too. There is one exception: a parameter that was rounded up to a power of
    two, and that the update changes to nearly zero. Such a parameter differs by at most 2**-23 of
    its old value for one step, because not every narrow value can be reached by a float32 update.
    The updates are float32, since their sum with the narrow parameters would otherwise be rounded
    twice. Gradients may have any floating dtype. `init` accepts float32 parameters, and the model
    then starts from their rounded values.

    Raises:
      ConfigError: the dtype is neither bfloat16 nor float16; an update lacks the parameters, or the
        dtype of the parameters is not `dtype`.

    >>> tx, params = master_weights(optax.sgd(1e-3)), jnp.bfloat16(1)
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...     updates, state = tx.update(jnp.bfloat16(1), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> f"{state.master:.4f} {params}"
    '0.9970 0.99609375'
    """
    narrow = jnp.dtype(dtype)
    if narrow not in NARROW:
        raise ConfigError(f"master_weights: dtype {narrow} must be bfloat16 or float16")
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> MasterState:
        # Float32 parameters are copied too: params and state may both be donated, and a buffer
        # cannot be donated twice.
        master = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return MasterState(master, inner.init(master))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        _check_narrow(params, narrow)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        updates, moved = inner.update(wide, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        # Neither this difference nor `optax.apply_updates` rounds. Narrow values that are close to
        # each other have an exact difference, and other differences are multiples of the unit in
        # the last place (ulp) of the float32 sum. The docstring describes the only exception.
        steps = jax.tree.map(
            lambda w, p: _rounded(w, narrow) - p.astype(jnp.float32), master, params
        )
        return steps, MasterState(master, moved)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_narrow(params: Params, narrow: jnp.dtype) -> None:
    if params is None:
        raise ConfigError(
            "master_weights: update needs params, but params is None: call update(updates, "
            "state, params)"
        )
    wrong = {str(p.dtype) for p in jax.tree.leaves(params)} - {str(narrow)}
    if wrong:
        raise ConfigError(
            f"master_weights: dtype={narrow}, but params are {', '.join(sorted(wrong))}; give the "
            f"model {narrow} parameters, or master_weights the dtype of the parameters"
        )
