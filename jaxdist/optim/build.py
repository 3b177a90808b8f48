"""The construction of an `Optimizer`, with its optax transformation, from a config."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from pydantic import Field, NonNegativeFloat, PositiveFloat

from jaxdist.config.importing import load_object
from jaxdist.errors import ConfigError
from jaxdist.optim.batch_scaling import scale
from jaxdist.optim.common import Beta, NamedParams, OptimizerConfig
from jaxdist.optim.imported.averages import EvalParams, eval_params_of
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.lars import LarsConfig
from jaxdist.optim.loss_scale import DynamicLossScaleConfig
from jaxdist.optim.muon import MuonConfig
from jaxdist.optim.precision import bf16_moments, master_weights
from jaxdist.optim.safety import clip_to_norm, count_skips, skip_nonfinite, skip_spikes, skip_states
from jaxdist.optim.schedules import StepClock, build_schedule
from jaxdist.optim.stacks.by_layer import by_layer
from jaxdist.sharding.dims import near_names
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, Grads, Kwargs, OptState, Params, PyTree, Scalar, Shardings, Updates


class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    type: Literal["adamw"]
    """The name that selects this optimizer in a config."""
    b1: Beta = 0.9
    """The decay of the first moment, which is the running mean of gradients."""
    b2: Beta = 0.999
    """The decay of the second moment, which is the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """A small number that is added to the square root of the second moment, so that no update
    divides by zero."""
    weight_decay: NonNegativeFloat = 0.0
    """The decoupled weight decay, which is multiplied by the learning rate. Biases and norm scales
    do not decay."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""
        return optax.adamw(
            rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=tree.matrices
        )


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"]
    """The name that selects this optimizer in a config."""
    momentum: Beta = 0.9
    """The decay of the velocity; 0 is gradient descent without momentum."""
    nesterov: bool = False
    """Whether to use Nesterov's momentum, which looks one step ahead along the velocity."""
    weight_decay: NonNegativeFloat = 0.0
    """The L2 decay that is added to the gradient. Biases and norm scales do not decay."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the update rule from a learning-rate schedule, for the parameters of `tree`."""
        # With a momentum of 0 optax would still keep a velocity for each parameter; with None it
        # keeps none.
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay, tree.matrices),
            optax.sgd(rate, self.momentum or None, self.nesterov),
        )


class ImportedOptimizerConfig(OptimizerConfig):
    """A user's optimizer: a function from (learning_rate, **args) to an optax transformation.

    The learning rate that the function receives is an `optax.Schedule`, a function of the step.
    """

    type: Literal["import"]
    """The name that selects this optimizer in a config."""
    path: str
    """The import path of the function, `mypkg.module:name`."""
    args: Kwargs = Field(default_factory=dict)
    """The keyword arguments for the function, by name."""
    eval_params: str | None = None
    """The import path of a function that returns the parameters to evaluate, given the optimizer's
    state and the trained parameters. null evaluates the trained parameters, or the average of
    `optax.contrib.schedule_free`."""

    def transform(self, rate: optax.Schedule, tree: NamedParams) -> optax.GradientTransformation:
        """Build the user's transformation, in which each layer of a stack is a separate tensor.

        Raises:
          ConfigError: the function does not exist, does not return a transformation, or returns a
            transformation whose first update is not finite.
        """
        made = load_object(self.path)(rate, **self.args)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise ConfigError(
                f"optim.path {self.path} returned {type(made).__name__}, "
                "but must return an optax.GradientTransformation"
            )
        made = taking_extra(made)
        _check_finite(made, self.path)
        return by_layer(made, tree.stacked)


def _check_finite(made: optax.GradientTransformationExtraArgs, path: str) -> None:
    """Refuse a transformation whose first update is not finite if parameters and gradients are 1.

    For example, with a decay of 1 the bias correction is 0 / 0. No other check finds such a mistake
    before the run.

    Raises:
      ConfigError: the update is not finite.
    """
    one, ones = jnp.ones(()), {"kernel": jnp.ones((2, 2))}
    try:
        # The check runs on the CPU, so that it compiles nothing for an accelerator and takes none
        # of its memory.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            updates, _ = made.update(ones, made.init(ones), ones, grad_norm=2 * one, value=one)
            finite = all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    # The user's rule may work only for the tree of the user's model, and may raise any exception
    # for the tree of this check.
    except Exception:
        return
    if not finite:
        raise ConfigError(
            f"optim.path {path}: the first update of a parameter of 1 with a gradient of 1 is not "
            "finite. Check optim.args: decays such as b1 and b2 must be below 1, and eps above 0"
        )


def taking_extra(transform: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that it receives only the extra arguments that its signature names.

    Some transformations take extra arguments but refuse unknown names (`optax.contrib.sam`).
    """
    transform = optax.with_extra_args_support(transform)
    taken = inspect.signature(transform.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return transform
    names = {parameter.name for parameter in taken}

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        known = {name: value for name, value in extra.items() if name in names}
        return transform.update(updates, state, params, **known)

    return optax.GradientTransformationExtraArgs(transform.init, update)


OptimConfig = Annotated[
    AdamWConfig | SgdConfig | LambConfig | LarsConfig | MuonConfig | ImportedOptimizerConfig,
    Field(discriminator="type"),
]


MAX_SKIPPED = 20
"""The default number of consecutive steps that may be skipped before a run ends."""


@dataclass(frozen=True)
class Rate:
    """The learning rate as a function of the step (0-based), and the derivation of its values.

    Attributes:
      schedule: the learning rate as a function of the step.
      explained: a line for each value that is derived from other settings.
    """

    schedule: optax.Schedule
    explained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation, with the properties that a train step needs.

    Attributes:
      transform: the optax transformation; see `update` for its arguments.
      schedule: the learning rate that the transformation uses, as a function of the step.
      explained: a line for each value that is derived from other settings.
      param_dtype: the dtype of the stored parameters, or None to keep the model's dtypes.
      loss_scale: the rule for the factor by which the loss is multiplied before its gradient is
        taken, or None without such a factor.
      max_skipped: the largest number of consecutive skipped steps with which a run continues, or
        None if no step is ever skipped.
      skips_empty: whether a step whose batch has the weight 0 is skipped before the update.
      clock: the counter of skipped steps, which the schedule inside the transformation reads.
      rule: the optimizer's transformation without the wrappers of this module, or None if it is
        unknown.
      eval_params: a function from (the transformation's state, the trained parameters) to the
        parameters to evaluate, or None to evaluate the trained parameters.
      place: a function that builds the transformation for given shardings of the parameters, or
        None if the transformation does not depend on the shardings.
    """

    transform: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    explained: tuple[str, ...] = ()
    param_dtype: DTypeLike | None = None
    loss_scale: DynamicLossScaleConfig | None = None
    max_skipped: int | None = None
    skips_empty: bool = False
    clock: StepClock = field(default_factory=StepClock)
    rule: optax.GradientTransformationExtraArgs | None = None
    eval_params: EvalParams | None = None
    place: Callable[[Shardings], optax.GradientTransformationExtraArgs] | None = None

    def update(
        self, grads: Grads, state: OptState, params: Params, *, grad_norm: Scalar, value: Scalar
    ) -> tuple[Updates, OptState]:
        """Compute the updates and the transformation's next state.

        Args:
          grads, state, params: the arguments of an optax update.
          grad_norm: the gradients' global norm, so that clipping need not compute it again.
          value: the mean loss of the batch, for rules that use the loss (`optax.polyak_sgd`).

        Raises:
          ConfigError: the transformation needs arguments besides these.
        """
        skipped = next((found.skipped for found in skip_states(state)), None)
        # The optimizer does not count skipped steps, so the schedule adds the number of skipped
        # steps to the optimizer's count.
        try:
            with self.clock.behind(skipped):
                return self.transform.update(grads, state, params, grad_norm=grad_norm, value=value)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ConfigError(
                f"optim: {error}; a step computes the loss once, and passes to the update only the "
                "gradients, state, parameters, grad_norm and value (the mean loss). Use a rule "
                "that needs no more (optax.lbfgs without its line search: linesearch=None)"
            ) from error

    def skipping_empty(self) -> Optimizer:
        """Return this optimizer, changed for a train step that skips batches of weight 0.

        The state then holds counters of skipped steps, even if the config skips no steps.
        """
        if self.max_skipped is not None:
            return replace(self, skips_empty=True)
        counted = count_skips(self.transform)
        return replace(self, transform=counted, max_skipped=MAX_SKIPPED, skips_empty=True)

    def placed(self, shares: Shardings) -> Optimizer:
        """Return this optimizer for updates of parameters that have the shardings `shares`."""
        return self if self.place is None else replace(self, transform=self.place(shares))

    def stored(self, params: Params) -> Params:
        """Cast the model's parameters to the dtype in which they are stored."""
        return params if self.param_dtype is None else optax.tree.cast(params, self.param_dtype)


def plan_rate(
    config: OptimizerConfig,
    *,
    total_steps: int,
    batch_size: int | None = None,
    examples_per_epoch: int | None = None,
) -> Rate:
    """Plan the learning rate of a run of `total_steps`.

    Args:
      batch_size: the number of examples in an optimizer step, over all devices and microbatches.
        None is allowed if the config has no scale_from.
      examples_per_epoch: the size of the training split. None is allowed if the config has no
        scale_from.warmup_epochs.

    Raises:
      ConfigError: neither learning_rate nor scale_from is given; the warm-up is too long.
    """
    schedule, given = config.schedule, config.scale_from
    if given is None:
        if config.learning_rate is None:
            raise ConfigError("set exactly one of learning_rate and scale_from")
        peak = config.learning_rate
        rate = build_schedule(schedule, peak=peak, total_steps=total_steps)
        return Rate(rate, _explain_cut(schedule.warmup_steps, total_steps))
    assert batch_size is not None, "scale_from needs a batch size"
    found = scale(
        given, batch_size=batch_size, total_steps=total_steps, examples_per_epoch=examples_per_epoch
    )
    explained = [f"learning rate {found.learning_rate.why}"]
    if given.warmup:
        schedule = schedule.model_copy(update={"warmup_steps": int(found.warmup_steps.value)})
        explained.append(f"warm-up {found.warmup_steps.why}")
    peak = found.learning_rate.value
    return Rate(build_schedule(schedule, peak=peak, total_steps=total_steps), tuple(explained))


def _explain_cut(warmup: int, total_steps: int) -> tuple[str, ...]:
    """Return a line which says that the run ends within its warm-up, or () for a longer run."""
    if warmup <= total_steps:
        return ()
    return (
        f"the run ends in its warm-up of {warmup} steps, at step {total_steps} and "
        f"{total_steps / warmup:.0%} of the learning rate; set optim.schedule.warmup_steps to a "
        "smaller number",
    )


def build_optimizer(
    config: OptimizerConfig, *, params: Params, dims: Mapping[str, Dims], rate: Rate
) -> Optimizer:
    """Build the optimizer of a run that trains the parameters `params`.

    Args:
      dims: the logical dims of each parameter, by name.
      rate: the learning rate, such as the result of `plan_rate`.

    Raises:
      ConfigError: a pattern of `rates` sets the factor of no parameter, or an imported rule cannot
        be used.
    """
    clock = StepClock()
    schedule, tree = clock.by_steps(rate.schedule), NamedParams(params, dims)
    rule = config.transform(schedule, tree)
    factors = _factors(config.rates, params)

    def place(shares: Shardings) -> optax.GradientTransformationExtraArgs:
        own = config.transform(schedule, replace(tree, shares=shares))
        return _wrapped(_scaled(own, factors), config)

    eval_params: EvalParams | None = None
    if isinstance(config, ImportedOptimizerConfig):
        eval_params = eval_params_of(config.eval_params, rule, params)
    return Optimizer(
        transform=_wrapped(_scaled(rule, factors), config),
        schedule=rate.schedule,
        explained=rate.explained,
        param_dtype=jnp.dtype(config.master_weights) if config.master_weights else None,
        loss_scale=config.loss_scale,
        max_skipped=(config.max_skipped or MAX_SKIPPED) if config.skips else None,
        clock=clock,
        rule=optax.with_extra_args_support(rule),
        eval_params=eval_params,
        place=place if config.whole_matrices else None,
    )


def _factors(rates: Mapping[str, float], params: Params) -> PyTree:
    """Return the factor on each parameter's learning rate, as a tree like the parameters.

    Raises:
      ConfigError: a pattern sets the factor of no parameter.
    """
    names = [name for name, _ in flatten_with_names(params)]
    first = [next((p for p in rates if fnmatch.fnmatchcase(name, p)), None) for name in names]
    idle = [pattern for pattern in rates if pattern not in first]
    if idle:
        lines = [
            f"{p!r} has no effect: earlier patterns match all parameters that this pattern matches"
            if fnmatch.filter(names, p)
            else f"{p!r} matches no parameter that is trained: {near_names(p, names)}"
            for p in idle
        ]
        raise ConfigError("\n".join(lines), setting=("rates",))
    factors = [1.0 if pattern is None else rates[pattern] for pattern in first]
    return jax.tree.unflatten(jax.tree.structure(params), factors)


def _scaled(inner: optax.GradientTransformation, factors: PyTree) -> optax.GradientTransformation:
    """Wrap `inner` so that each parameter's updates are multiplied by its learning-rate factor."""
    if all(factor == 1.0 for factor in jax.tree.leaves(factors)):
        return inner
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, OptState]:
        found, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda factor, u: u * factor, factors, found), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _wrapped(
    inner: optax.GradientTransformation, config: OptimizerConfig
) -> optax.GradientTransformationExtraArgs:
    """Wrap an update rule in wrappers of `precision.py`, and then in wrappers of `safety.py`."""
    if config.bf16_moments:
        inner = bf16_moments(inner)
    if config.master_weights is not None:
        inner = master_weights(inner, config.master_weights)
    clipped = clip_to_norm(inner, config.clip_norm)
    if config.skip_spikes is not None:  # `skip_spikes` also skips gradients that are not finite.
        return skip_spikes(
            clipped, factor=config.skip_spikes.factor, window=config.skip_spikes.window
        )
    return skip_nonfinite(clipped) if config.skips else clipped
