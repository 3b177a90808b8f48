"""Safe steps: the clipping of gradients, and the skipping of bad batches (NaN, spikes, no weight).

Each function is pure or returns an `optax.GradientTransformationExtraArgs`, and runs under jit
without a transfer to the host. The wrappers of this module and of `precision.py` are nested in this
order:

    skip_nonfinite(skip_spikes(master_weights(bf16_moments(optax.adamw(1e-3)))))

Inside `jax.shard_map`, where a device sees only its shards, pass the partition specs of the
gradients. All devices then make the same decision, at the cost of an all-reduce of a single number.
Under automatic sharding no specs are necessary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import Field

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError, RunError
from jaxdist.mesh import entry_names
from jaxdist.optim.layers import StepCount
from jaxdist.types import Grads, OptState, Params, PyTree, Shardings, Specs, Updates


def _axes(spec: PartitionSpec) -> set[str]:
    return {name for entry in spec for name in entry_names(entry)}


def _all_axes(specs: Specs) -> tuple[str, ...]:
    return tuple(sorted(set().union(*(_axes(spec) for spec in jax.tree.leaves(specs)))))


def _wide_square(x: jax.Array) -> jax.Array:
    size = jnp.abs(x) if jnp.iscomplexobj(x) else x
    return jnp.square(size.astype(jnp.float32))


def global_norm(tree: PyTree, specs: Specs = None) -> jax.Array:
    """Return the Euclidean norm of all leaves together, summed in float32 for every dtype.

    Args:
      specs: the leaves' partition specs inside `jax.shard_map`, or None outside of
        `jax.shard_map`. With specs the function needs an all-reduce of 4 bytes. A leaf counts once,
        even if several devices hold replicas of it.

    >>> float(global_norm({"w": jnp.full((4,), 300, jnp.float16)}))
    600.0
    """
    return jnp.sqrt(total_square(jax.tree.leaves(tree), jax.tree.leaves(specs)))


def global_norm_of_shards(tree: PyTree, shardings: Shardings) -> jax.Array:
    """Return the `global_norm` of leaves with these shardings, under automatic sharding.

    XLA would need an all-reduce for each leaf. This function needs one all-reduce of a single
    number for all leaves that are split into equal parts.
    """
    leaves, placed = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    # `jax.shard_map` accepts only leaves whose dims are split into equal parts.
    split = [i for i, s in enumerate(placed) if _axes(s.spec) and _divides(leaves[i], s)]
    rest = [x for i, x in enumerate(leaves) if i not in split]
    total = total_square(rest, [])
    if split:
        specs = [placed[i].spec for i in split]
        total += jax.shard_map(
            lambda shards: total_square(shards, specs),
            mesh=placed[0].mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(),
            check_vma=False,
        )([leaves[i] for i in split])
    return jnp.sqrt(total)


def _divides(leaf: jax.Array, sharding: NamedSharding) -> bool:
    parts = sharding.mesh.shape
    return all(
        length % math.prod(parts[name] for name in entry_names(entry)) == 0
        # A spec may have fewer entries than the shape has dims; the last dims are then not split.
        for length, entry in zip(leaf.shape, sharding.spec, strict=False)
    )


def total_square(leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> jax.Array:
    """Return the sum of the squares of all elements, including shards on other devices.

    Args:
      specs: the partition spec of each leaf inside `jax.shard_map`, or () outside of
        `jax.shard_map`.
    """
    # Squares of float16 values above 255 overflow, so each value is widened before it is squared.
    squares = [jnp.sum(_wide_square(x)) for x in leaves]
    axes = _all_axes(specs)
    if not axes:
        return sum(squares, start=jnp.float32(0))
    total = jnp.float32(0)
    for square, spec in zip(squares, specs, strict=True):
        # The all-reduce below sums over all axes at once. Along some axes, devices may hold copies
        # of this leaf. The square is divided by the number of copies, because the sum counts every
        # copy.
        copies = set(axes) - _axes(spec)
        total += square / (lax.axis_size(tuple(copies)) if copies else 1)
    return lax.psum(total, axes)


def all_finite(tree: PyTree, specs: Specs = None) -> jax.Array:
    """Return whether all elements of all leaves are finite, as a bool scalar.

    Args:
      specs: the leaves' partition specs inside `jax.shard_map`, or None outside of
        `jax.shard_map`. With specs the function needs an all-reduce of 4 bytes.
    """
    fine = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    ok = jnp.all(jnp.stack(fine)) if fine else jnp.array(True)
    axes = _all_axes(specs)
    # The all-reduce counts the devices with a bad value, since jax has no logical all-reduce.
    return lax.psum(jnp.int32(~ok), axes) == 0 if axes else ok


class SkipSpikesConfig(Config):
    """The settings of the rule that skips steps with a large gradient norm."""

    factor: Annotated[float, Field(gt=1)] = 4.0
    """The multiple of the recent mean gradient norm above which a step is skipped."""
    window: Count = 100
    """The number of steps over which the mean is taken. None of the first `window` steps is skipped
    for a large norm."""


def clip_to_norm(
    inner: optax.GradientTransformation, limit: float | None
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that gradients are first scaled down if their norm exceeds `limit`.

    The norm is the norm of all gradients together. If this norm is already known, pass it to the
    update as `grad_norm`, which saves a read of the gradients. The state is the state of `inner`.
    With a limit of None gradients are never scaled.

    >>> tx = clip_to_norm(optax.sgd(1.0), 0.5)
    >>> float(tx.update(jnp.float32(2), tx.init(jnp.float32(0)))[0])
    -0.5
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Updates,
        state: OptState,
        params: Params = None,
        *,
        grad_norm: jax.Array | None = None,
        **extra: object,
    ) -> tuple[Updates, OptState]:
        if limit is not None:
            norm = global_norm(updates) if grad_norm is None else grad_norm
            # The small term keeps the quotient finite if all gradients are zero.
            scale = jnp.minimum(1.0, limit / (norm + 1e-12))
            updates = jax.tree.map(lambda g: g * scale, updates)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


RuleMemory: TypeAlias = Any
"""The values that a rule for skipping keeps between steps: a tree of arrays, or None."""


class SkipState(NamedTuple):
    """The inner state, int32 counters of skipped steps, and the memory of the rule for skipping."""

    inner: OptState
    skipped: jax.Array
    """The number of steps skipped since the start of the run."""
    consecutive: jax.Array
    """The number of steps skipped since the last accepted step."""
    rule: RuleMemory


SkipRule = Callable[[Grads, RuleMemory], tuple[jax.Array, RuleMemory]]
"""A function from (gradients, memory) to (accept, next memory). If the bool scalar accept is false,
the step is skipped.
"""


def _stay(update: jax.ShapeDtypeStruct, grad: jax.Array) -> jax.Array:
    """Return an update of -0.0, which changes no parameter: x + -0.0 equals x to the bit."""
    still = jnp.full(update.shape, -0.0, update.dtype)
    # The `where` does not change the value, but makes it vary over the gradients' manual axes: both
    # branches of a `lax.cond` must vary over the same axes.
    return jnp.where(grad == 0, still, still)


def _skip_unless(
    inner: optax.GradientTransformation, first: RuleMemory, rule: SkipRule | None
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` to skip each step that `rule` does not accept; with None, no step is skipped."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> SkipState:
        zero = jnp.zeros((), jnp.int32)
        return SkipState(inner.init(params), zero, zero, jax.tree.map(jnp.asarray, first))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        def move() -> tuple[Updates, OptState]:
            return inner.update(updates, state.inner, params, **extra)

        def still() -> Updates:
            return jax.tree.map(_stay, jax.eval_shape(move)[0], updates)

        if rule is None:
            moved, kept = move()
            return moved, _counted(kept, state, jnp.array(True), None)
        accept, memory = rule(updates, state.rule)
        moved, kept = lax.cond(accept, move, lambda: (still(), state.inner))
        return moved, _counted(kept, state, accept, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def _counted(inner: OptState, state: SkipState, accept: jax.Array, memory: RuleMemory) -> SkipState:
    """Return the state after a step that was accepted or skipped."""
    more = jnp.int32(~accept)
    # `more` is 0 after an accepted step, so the product sets the count of consecutive skips back to
    # 0.
    return SkipState(inner, state.skipped + more, (state.consecutive + more) * more, memory)


def count_skips(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap the state of `inner` in a `SkipState`, whose counters `skipped_once` increases.

    The wrapper itself skips no step.
    """
    return _skip_unless(inner, None, None)


def skipped_once(state: OptState) -> OptState:
    """Return the state after a skipped step, in which only the counters of its `SkipState` change.

    The `SkipState` may be nested inside the state of an outer transformation.

    >>> tx = count_skips(optax.adam(1e-3))
    >>> state = skipped_once(skipped_once(tx.init(jnp.ones(2))))
    >>> int(state.skipped), int(state.consecutive), int(state.inner[0].count)
    (2, 2, 0)
    """

    def counted(part: PyTree) -> PyTree:
        if not isinstance(part, SkipState):
            return part
        return _counted(part.inner, part, jnp.array(False), part.rule)

    return jax.tree.map(counted, state, is_leaf=lambda part: isinstance(part, SkipState))


def skip_nonfinite(
    inner: optax.GradientTransformation, *, specs: Specs = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that each step whose gradients contain a NaN or an infinity is skipped.

    In a skipped step the updates are zero, no bit of the inner state changes, and the outer state
    (`SkipState`) counts the step. Cost: another read of the gradients, and a write of the
    updates, since XLA does not fuse across the branch.

    >>> tx = skip_nonfinite(optax.sgd(1.0))
    >>> updates, state = tx.update({"w": jnp.array(jnp.nan)}, tx.init({"w": jnp.array(2.0)}))
    >>> float(optax.apply_updates({"w": jnp.array(2.0)}, updates)["w"]), int(state.skipped)
    (2.0, 1)
    """
    return _skip_unless(inner, None, lambda grads, _: (all_finite(grads, specs), None))


class NormMean(NamedTuple):
    """The running mean of gradient norms (float32) and the number of norms in it (int32)."""

    mean: jax.Array
    count: StepCount


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    factor: float = 4.0,
    window: int = 100,
    specs: Specs = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that steps whose gradient norm exceeds `factor` times the mean are skipped.

    The mean is the arithmetic mean over the first `window` steps, and then a moving average with
    decay 1 - 1 / `window`. A step among the first `window` steps, or with a mean of 0, is not
    skipped if its norm is finite. The norm of a skipped step enters the mean as `factor` times the
    mean, so that a lasting change of level is eventually accepted. A step whose norm is not finite
    is always skipped, and its norm never enters the mean.

    Raises:
      ConfigError: the factor is not above 1 or not finite; the window is under 1.
    """
    if not 1 < factor < float("inf"):
        raise ConfigError(f"skip_spikes: factor {factor} must be finite and above 1, such as 4")
    if window < 1:
        raise ConfigError(f"skip_spikes: window {window} must be at least 1 step, such as 100")

    def rule(grads: Grads, seen: NormMean) -> tuple[jax.Array, NormMean]:
        norm = global_norm(grads, specs)
        # A mean of zero, after gradients that were all zero, would make every later step a spike.
        known = (seen.count >= window) & (seen.mean > 0)
        limit = jnp.where(known, factor * seen.mean, jnp.inf)
        usable = jnp.isfinite(norm)
        count = jnp.minimum(seen.count + 1, window)
        mean = seen.mean + (jnp.minimum(norm, limit) - seen.mean) / count
        kept = NormMean(jnp.where(usable, mean, seen.mean), jnp.where(usable, count, seen.count))
        return usable & (norm <= limit), kept

    return _skip_unless(inner, NormMean(jnp.float32(0), jnp.int32(0)), rule)


def skip_states(state: OptState) -> list[SkipState]:
    """Return every `SkipState` inside an optimizer state, outermost first."""
    if isinstance(state, SkipState):
        return [state, *skip_states(state.inner)]
    stop = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SkipState))
    return [found for node in stop if isinstance(node, SkipState) for found in skip_states(node)]


def check_skips(consecutive: int, skipped: int, *, max_consecutive: int) -> None:
    """End a run that skips too many consecutive steps.

    Args:
      consecutive, skipped: the counters of the run's `SkipState`.
      max_consecutive: the largest number of consecutive skipped steps that is accepted.

    Raises:
      RunError: more than `max_consecutive` consecutive steps were skipped.
    """
    if consecutive > max_consecutive:
        raise RunError(
            f"{consecutive} consecutive steps were skipped (at most {max_consecutive} are allowed; "
            f"{skipped} were skipped since the start): their gradients were not finite or too "
            "large, or all examples had weight 0. Lower the learning rate, lengthen the warm-up, "
            "or look for bad examples and for masks that hide all tokens"
        )
