"""Three steps of training with a plan, and their differences from training on a single device.

Exact plans differ only in the order in which floats are summed. Three relative differences are
measured, so that the same limits are suited to any model:

- the loss of each step, relative to its value on a single device;
- the gradient of the first step, as the optimizer receives it: for each parameter, the norm of the
  difference, divided by the gradient's norm on a single device;
- the update, which is the parameters after the last step minus the initial parameters. The
  difference of the update is measured like the difference of the gradient.

All plans begin with the state that a single device initialized. Tests check that every mesh
initializes the same state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.experiment import Experiment, TrainStage
from jaxdist.parity.states import leaves_by_name, place_state, updates_of
from jaxdist.train.evaluate import evaluate
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.types import Grads, Json, JsonObject, OptState, Params, Updates

STEPS = 3
"""The number of steps of a comparison."""
LAYER_TERMS = 512
"""The least number of terms of a sum that the limits assume. Even for a small batch, the sums
within a layer have about this number of terms."""
COMPILE: Mapping[str, Json] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""The options with which XLA compiles. The options do not change how XLA partitions a program, but
XLA optimizes its loops less. This saves time, since each program only runs for `STEPS` steps."""


@dataclass(frozen=True)
class Differences:
    """The largest relative differences from a single device, over all steps and parameters.

    Attributes:
      loss: the largest difference of the loss of a step.
      gradient: the largest difference of the gradient of a parameter.
      update: the largest difference of the update of a parameter or buffer.
    """

    loss: float
    gradient: float
    update: float

    def within(self, limit: Differences) -> bool:
        """Return whether all differences are within the given limits.

        NaN is not within any limit.
        """
        pairs = zip(astuple(self), astuple(limit), strict=True)
        return all(found <= bound for found, bound in pairs)


@dataclass(frozen=True)
class Trace:
    """The results of a run that are compared with the results of another run, on the host.

    Attributes:
      values: the loss of each step, by the step's number, and the held-out loss after the last
        step. Some runs have other metrics instead of these losses, by name.
      gradients: the gradient of each parameter in the first step, by the parameter's name.
      updates: the changes of parameters and buffers over all steps, by name.
    """

    values: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    updates: Mapping[str, np.ndarray] = field(default_factory=dict)


FIELDS: tuple[str, ...] = "values", "gradients", "updates"
"""The fields of `Trace`, in the order of the fields of `Differences`."""
Floors = Mapping[str, Mapping[str, float]]
"""A floor for each norm by which a tensor's difference is divided, by field of a `Trace` and by the
tensor's name."""


class Noted(NamedTuple):
    """An optimizer's state together with the gradients that the optimizer received last."""

    gradients: Grads
    inner: OptState


def noted(experiment: Experiment) -> Experiment:
    """Return the same experiment with an optimizer whose state also keeps the last gradients.

    The state of the optimizer becomes a `Noted`.
    """
    inner = experiment.program.optimizer.transform

    def init(params: Params) -> Noted:
        return Noted(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, Noted]:
        found, own = inner.update(updates, state.inner, params, **extra)
        # With master weights, gradients are narrower than the parameters that `init` receives. A
        # compiled program accepts no state whose dtypes change from step to step.
        kept = jax.tree.map(lambda g, old: g.astype(old.dtype), updates, state.gradients)
        return found, Noted(kept, own)

    transform = optax.GradientTransformationExtraArgs(init, update)
    chosen = experiment.program.optimizer.eval_params
    own_params = chosen and (lambda state, params: chosen(state.inner, params))
    optimizer = experiment.program.optimizer
    optimizer = replace(optimizer, transform=transform, eval_params=own_params)
    # Stages with equal batch sizes share a program, which is then compiled once.
    programs: dict[int, Program] = {}
    for stage in experiment.stages:
        programs.setdefault(stage.batch_size, replace(stage.program, optimizer=optimizer))
    stages = tuple(replace(s, program=programs[s.batch_size]) for s in experiment.stages)
    program = replace(experiment.program, optimizer=optimizer)
    own = programs.get(experiment.config.train.batch_size, program)
    return replace(experiment, program=own, stages=stages)


@cache
def compile_options() -> JsonObject:
    """Return the options of `COMPILE` that XLA has; the XLA of jax 0.12 lacks some options."""
    program = jax.jit(jnp.negative).lower(0)

    def known(name: str) -> bool:
        try:
            program.compile({name: COMPILE[name]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: COMPILE[name] for name in filter(known, COMPILE)}


def compiled_at() -> str:
    """Return XLA's optimization level in comparisons, as a clause for a heading."""
    level = compile_options().get("xla_backend_optimization_level", "its own")
    return f"XLA compiles at optimization level {level}"


@dataclass(frozen=True)
class FirstSteps:
    """The compiled first steps of an experiment, which can begin with any state.

    Attributes:
      experiment: an experiment that `noted` returned.
    """

    experiment: Experiment

    @property
    def compiled(self) -> Any:
        """The compiled step of the first train stage."""
        return self._steps[0][1]

    @cached_property
    def _steps(self) -> list[tuple[TrainStage, Any]]:
        """Pairs of a train stage and its compiled step."""
        compiled: dict[int, Any] = {}
        for stage in self.experiment.stages:
            if stage.batch_size not in compiled:
                program = stage.program
                lowered = program.train.lower(program.state_shapes, program.batch)
                compiled[stage.batch_size] = lowered.compile(compile_options())
        return [(stage, compiled[stage.batch_size]) for stage in self.experiment.stages]

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the compiled step and the batch for each step of training."""
        for stage, step in self._steps:
            with stage.loader.batches() as batches:
                for batch in itertools.islice(batches, stage.last_step - stage.first_step):
                    yield step, batch

    @cached_property
    def _evaluating(self) -> Program:
        """The program whose evaluation is compiled with the options of `COMPILE`."""
        program = self.experiment.program
        return replace(program, options={**program.options, **compile_options()})

    def _evaluation(self, state: TrainState) -> dict[str, np.ndarray]:
        means = self.means(state)
        return {"evaluation": np.asarray(means["loss"])} if means else {}

    def means(self, state: TrainState) -> dict[str, Any]:
        """Return the results of the evaluation by name, or {} without held-out examples."""
        program, heldout = self._evaluating, self.experiment.heldout
        if heldout is None:
            return {}
        with heldout.evaluation_batches() as batches:
            return evaluate(program, program.evaluated(state), state.buffers, batches)

    def begin(self) -> TrainState:
        """Return the initial state of the experiment, on the host."""
        program = self.experiment.program
        state = jax.jit(program.init, compiler_options=compile_options())()
        return jax.device_get(program.home.used(state))

    def run(self, initial: TrainState) -> tuple[Trace, TrainState]:
        """Train for three steps, and return the results to compare and the last state.

        The last state is on the devices, in the form in which the plan stores a state.

        Args:
          initial: the initial state on the host.
        """
        program = self.experiment.program
        state = place_state(program, initial)
        values: dict[str, np.ndarray] = {}
        gradients: dict[str, np.ndarray] = {}
        for count, (step, batch) in enumerate(itertools.islice(self._batches(), STEPS), start=1):
            state, metrics = step(state, batch)
            values[str(count - 1)] = np.asarray(metrics[0], np.float64)
            if not gradients:
                gradients = leaves_by_name(program.home.used(state).opt_state.gradients)
            state = self.between(state, count)
        # The evaluation comes first. Arrays that are read from the state may share its memory,
        # which a step may reuse.
        values |= self._evaluation(state)
        return Trace(values, gradients, updates_of(initial, program.home.used(state))), state

    def between(self, state: TrainState, count: int) -> TrainState:
        """Return the state after the strategy's exchange between step `count` and the next step."""
        program = self.experiment.program
        due = program.outer is not None and program.outer.due(count)
        return program.between(state) if due else state


def trace_distances(
    found: Trace, reference: Trace, least: Floors | None = None
) -> dict[str, dict[str, float]]:
    """Return the relative difference of each tensor, by field of a `Trace` and by name.

    Args:
      found: the results of a plan.
      reference: the results of a single device.
      least: the least norms by which differences are divided, or None for no lower bound.
    """

    def measured(field: str) -> dict[str, float]:
        """Return the differences of a field of `Trace` by name.

        A difference is infinite if only the reference is 0, or if the reference lacks the value.
        """
        ours, theirs = getattr(found, field), getattr(reference, field)
        leasts = (least or {}).get(field, {})
        return dict.fromkeys(ours.keys() - theirs.keys(), math.inf) | {
            name: _distance(ours[name], expected, leasts.get(name, 0.0))
            for name, expected in theirs.items()
            # The loss of a batch whose weights are all 0 is NaN, on a single device as well.
            if not (field == "values" and np.isnan(expected) and np.isnan(ours[name]))
        }

    return {field: measured(field) for field in FIELDS}


def trace_differences(found: Trace, reference: Trace, least: Floors | None = None) -> Differences:
    """Return the largest relative differences of losses, gradients and updates.

    A difference is NaN or infinite if any of the compared values is.

    Args:
      found: the results of a plan.
      reference: the results of a single device.
      least: the least norms by which differences are divided, or None for no lower bound.
    """
    worst = (
        math.nan if any(map(math.isnan, of.values())) else max(of.values(), default=0.0)
        for of in trace_distances(found, reference, least).values()
    )
    return Differences(*worst)


def _distance(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    off, norm = _norm(found - expected), max(_norm(expected), least)
    return off / norm if norm else (0.0 if off == 0 else math.inf)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


SMALL = 1e-2
"""The floor for the norm by which a gradient's difference is divided, as a fraction of the norm of
the vector of all gradients."""


def norms_at_least(
    reference: Trace, limit: Differences, *moved: Trace, times: float = 1.0
) -> Floors:
    """Return a floor for each norm by which a tensor's difference is divided.

    A gradient whose terms nearly cancel has the rounding error of the terms and not of their sum.
    The difference of a gradient is therefore divided by at least `SMALL` times the norm of all
    gradients, and the update of its parameter may differ correspondingly more. The runs in `moved`
    show how far rounding moves a value on a single device. If a value of such a run differs from
    `reference` by more than the limit, the same value of a plan may differ as much.

    Args:
      reference: the results of a single device.
      limit: the limits on differences.
      moved: the results of other runs on a single device: with `nudged` initial parameters and, if
        `reference` is in half precision, in float32.
      times: the allowed multiple of a change in `moved`. The multiple is 2 if a plan and the
        reference both round to bfloat16, since then both have the error of rounding.
    """
    total = math.hypot(*map(_norm, reference.gradients.values()))
    gradients = dict.fromkeys(reference.gradients, SMALL * total)

    def growth(name: str) -> float:
        """Return the floor for the norm of a gradient's error, divided by the gradient's norm."""
        gradient = reference.gradients.get(name)
        return 1.0 if gradient is None else gradients[name] / (_norm(gradient) or 1.0)

    updates = {
        name: _norm(update) * max(1.0, growth(name)) for name, update in reference.updates.items()
    }

    def moves(field: str, bound: float, least: Mapping[str, float]) -> dict[str, float]:
        ours, others = getattr(reference, field), [getattr(other, field) for other in moved]
        return {
            name: max(
                least.get(name, 0.0),
                *(times * _norm(other[name] - value) / bound for other in others),
            )
            for name, value in ours.items()
        }

    floors: Floors = {"values": {}, "gradients": gradients, "updates": updates}
    bounds = dict(zip(FIELDS, astuple(limit), strict=True))
    return {field: moves(field, bounds[field], least) for field, least in floors.items()}


def limit_of(cuts: Sequence[str], terms: int) -> Differences:
    """Return the limits on differences that another order of summation causes in float32.

    A sum of n terms is rounded n times, at random, so that its relative error is about sqrt(n)
    2**-24. For each of `cuts`, two sums with this error are compared. The update may differ ten
    times as much as the gradient, because Adam divides by the gradient's size. The addition to the
    parameter is rounded too: for a parameter of 1 and an update of 1e-3, by up to 6e-5 of the
    update.

    Args:
      cuts: the names of the sums that are added in another order, as `cuts_of` returns them.
      terms: the number of terms in a gradient's sum, which is the number of tokens or examples in
        a batch.

    >>> limit_of(["over devices"], 512).gradient
    2.6973983046972182e-06
    """
    bound = 2 * len(cuts) * math.sqrt(max(terms, LAYER_TERMS)) * 2**-24
    return Differences(loss=bound, gradient=bound, update=10 * bound)


def half_limit_of(cuts: Sequence[str]) -> Differences:
    """Return the limits on differences between plans that round values to bfloat16.

    Each value has a relative rounding error of up to 2**-9, and a value that is rounded up in one
    order of summation may be rounded down in another. A gradient is a long product of rounded
    values.

    Args:
      cuts: the names of the sums that are added in another order, as `cuts_of` returns them.
    """
    bound = len(cuts) * 2**-6
    return Differences(loss=bound, gradient=bound, update=2 * bound)
