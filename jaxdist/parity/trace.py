"""Three steps of training, and their differences from those of another plan.

Exact plans differ only in the order in which floats are summed. Three differences are measured,
each relative, so that a single bound serves any model:

- loss: of each step, relative to its value on a single device;
- gradient: of the first step, as the optimizer receives it: for each parameter the norm of the
  difference relative to the norm on a single device;
- update: parameters after the last step minus the initial parameters, in the same way.

All begin with the state that a single device drew: tests check that every mesh draws the same.
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
from jaxdist.run.checkpoints import fresh_exchange
from jaxdist.train.evaluate import evaluate
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.trees import flatten_with_names
from jaxdist.types import Grads, Json, JsonObject, OptState, Params, PyTree, Updates

STEPS = 3
LAYER_TERMS = 512
"""Terms in the sums within a layer, which even a small batch has."""
COMPILE: Mapping[str, Json] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
"""Options under which XLA plans the same program, but compiles its loops faster; they run 3
times."""


@dataclass(frozen=True)
class Differences:
    """Differences relative to a single device; the worst of all steps and parameters."""

    loss: float
    gradient: float
    update: float

    def within(self, limit: Differences) -> bool:
        """Return whether none exceeds its limit; NaN does."""
        pairs = zip(astuple(self), astuple(limit), strict=True)
        return all(found <= bound for found, bound in pairs)


@dataclass(frozen=True)
class Trace:
    """The results of a run to compare: arrays on the host, parameters by name.

    Attributes:
      initial: the initial training state.
      evaluation: the held-out loss after the last step; empty where there are no such examples.
    """

    initial: TrainState
    losses: np.ndarray
    gradients: Mapping[str, np.ndarray]
    updates: Mapping[str, np.ndarray]
    evaluation: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def loss_of_step(self) -> dict[str, np.ndarray]:
        """The losses, step by step."""
        return {**{str(step): loss for step, loss in enumerate(self.losses)}, **self.evaluation}


class Noted(NamedTuple):
    """An optimizer's state, with the last gradients that it received."""

    gradients: Grads
    inner: OptState


def noted(experiment: Experiment) -> Experiment:
    """Return the same experiment, with an optimizer whose state also holds the last gradients."""
    inner = experiment.program.optimizer.transform

    def init(params: Params) -> Noted:
        return Noted(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, Noted]:
        found, own = inner.update(updates, state.inner, params, **extra)
        # With master weights gradients are narrower than the parameters that `init` receives.
        kept = jax.tree.map(lambda g, old: g.astype(old.dtype), updates, state.gradients)
        return found, Noted(kept, own)

    transform = optax.GradientTransformationExtraArgs(init, update)
    optimizer = replace(experiment.program.optimizer, transform=transform)
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
    """Return the options of `COMPILE` that this XLA has; that of jax 0.12 lost some."""
    program = jax.jit(jnp.negative).lower(0)

    def known(name: str) -> bool:
        try:
            program.compile({name: COMPILE[name]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: COMPILE[name] for name in filter(known, COMPILE)}


def compiled_at() -> str:
    """Describe XLA's optimization level here, for a heading."""
    level = compile_options().get("xla_backend_optimization_level", "its own")
    return f"XLA compiles at optimization level {level}"


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of an experiment that is `noted`, from any state, compiled once."""

    experiment: Experiment

    @cached_property
    def _steps(self) -> list[tuple[TrainStage, Any]]:
        """Return each stage with its compiled step."""
        compiled: dict[int, Any] = {}
        for stage in self.experiment.stages:
            if stage.batch_size not in compiled:
                program = stage.program
                lowered = program.train.lower(program.state_shapes, program.batch)
                compiled[stage.batch_size] = lowered.compile(compile_options())
        return [(stage, compiled[stage.batch_size]) for stage in self.experiment.stages]

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield the compiled step and the batch of each of the first steps."""
        for stage, step in self._steps:
            with stage.loader.batches() as batches:
                for batch in itertools.islice(batches, stage.last_step - stage.first_step):
                    yield step, batch

    def _evaluation(self, state: TrainState) -> dict[str, np.ndarray]:
        program, heldout = self.experiment.program, self.experiment.heldout
        if heldout is None:
            return {}
        with heldout.evaluation_batches() as batches:
            means = evaluate(program, state.params, state.buffers, batches)
        return {"evaluation": np.asarray(means["loss"])}

    def begin(self) -> TrainState:
        """Return the experiment's own initial state, on the host."""
        return own_initial_state(self.experiment.program)

    def run(self, initial: TrainState) -> tuple[Trace, TrainState]:
        """Train for three steps; return the results to compare, and the last stored state.

        Args:
          initial: the initial state on the host.
        """
        program = self.experiment.program
        state = place_state(program, initial)
        losses: list[float] = []
        gradients: dict[str, np.ndarray] = {}
        outer = program.outer
        for count, (step, batch) in enumerate(itertools.islice(self._batches(), STEPS), start=1):
            state, metrics = step(state, batch)
            losses.append(float(metrics[0]))
            if not gradients:
                gradients = leaves_by_name(program.home.used(state).opt_state.gradients)
            if outer is not None and outer.due(count):
                state = program.between(state)
        # Evaluated before the state is read: a step may reuse its arguments' memory.
        evaluation = self._evaluation(state)
        first, last = moving(initial), moving(program.home.used(state))
        updates = {name: last[name] - first[name] for name in last}
        return Trace(initial, np.array(losses), gradients, updates, evaluation), state


def own_initial_state(program: Program) -> TrainState:
    """Return a program's own initial state, on the host."""
    state = jax.jit(program.init, compiler_options=compile_options())()
    return jax.device_get(program.home.used(state))


def place_state(program: Program, initial: TrainState) -> TrainState:
    """Place a state on the host on a program's devices, in its stored form."""
    shapes = replace(program.state_shapes, exchange=())
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    # Copied, since the step may reuse the memory of its state.
    stored = program.home.stored(jax.tree.map(np.array, replace(initial, exchange=())))
    state = jax.device_put(stored, shardings)
    return replace(state, exchange=fresh_exchange(program))


def trace(experiment: Experiment, initial: TrainState | None = None) -> Trace:
    """Train for three steps and record the results to compare.

    Args:
      experiment: an experiment that is `noted`.
      initial: the state to begin with, on the host; None is the experiment's own.
    """
    steps = FirstSteps(experiment)
    return steps.run(steps.begin() if initial is None else initial)[0]


def moving(state: TrainState) -> dict[str, np.ndarray]:
    """Return the parameters, and the buffers that hold numbers, by name."""
    buffers = {
        f"buffer {name}": leaf
        for name, leaf in leaves_by_name(state.buffers).items()
        if np.issubdtype(leaf.dtype, np.floating)
    }
    return {**leaves_by_name(state.params), **buffers}


def leaves_by_name(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree in float64, by name."""
    return {name: np.asarray(leaf, np.float64) for name, leaf in flatten_with_names(tree)}


def trace_distances(
    found: Trace, reference: Trace, least: NormFloors | None = None
) -> dict[str, dict[str, float]]:
    """Compute the relative difference of each tensor, by field of a `Trace` and name.

    Args:
      least: divisors of differences where they exceed the norm on a single device.
    """

    def measured(field: str) -> dict[str, float]:
        """Return the differences; a value that is 0 on a single device must be 0."""
        ours, theirs = getattr(found, field), getattr(reference, field)
        leasts = getattr(least, field, {})
        return {
            name: _distance(ours[name], expected, leasts.get(name, 0.0))
            for name, expected in theirs.items()
            # The loss of a batch without weight is NaN, and must be so on both.
            if not (field == "loss_of_step" and np.isnan(expected) and np.isnan(ours[name]))
        }

    return {field: measured(field) for field in ("loss_of_step", "gradients", "updates")}


def trace_differences(
    found: Trace, reference: Trace, least: NormFloors | None = None
) -> Differences:
    """Compute the three differences; NaN or infinite where a number is.

    Args:
      least: divisors of differences where they exceed the norm on a single device.
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


@dataclass(frozen=True)
class NormFloors:
    """The least norm by which the difference of each tensor of a `Trace` is divided."""

    loss_of_step: Mapping[str, float]
    gradients: Mapping[str, float]
    updates: Mapping[str, float]


SMALL = 1e-2
"""Fraction of the norm of all gradients from which a tensor is judged by its own norm."""


def norms_at_least(
    reference: Trace, limit: Differences, *moved: Trace, times: float = 1.0
) -> NormFloors:
    """Scale differences in ill-conditioned tensors, so that a single limit serves all tensors.

    A gradient whose terms nearly cancel has the rounding error of its terms, not of its sum: a
    gradient that is small compared with all gradients is measured relative to a fraction of those,
    and the optimizer's update of it may differ correspondingly more. A value that moves by more
    than the limit when the initial parameters change in their last digits, or when everything is
    computed in float32, is measured relative to that movement.

    Args:
      moved: the reference from `nudged` parameters, and that in float32 if it is narrower.
      times: how often that distance is allowed: two plans that round differently to bfloat16 both
        have the error of a single plan.
    """
    total = math.hypot(*map(_norm, reference.gradients.values()))
    gradients = dict.fromkeys(reference.gradients, SMALL * total)

    def growth(name: str) -> float:
        """Return how much more an update may differ than its gradient; 1 for a buffer."""
        gradient = reference.gradients.get(name)
        return 1.0 if gradient is None else gradients[name] / (_norm(gradient) or 1.0)

    updates = {
        name: _norm(update) * max(1.0, growth(name)) for name, update in reference.updates.items()
    }

    def moves(field: str, bound: float, floors: Mapping[str, float]) -> dict[str, float]:
        ours, others = getattr(reference, field), [getattr(other, field) for other in moved]
        return {
            name: max(
                floors.get(name, 0.0),
                *(times * _norm(other[name] - value) / bound for other in others),
            )
            for name, value in ours.items()
        }

    return NormFloors(
        moves("loss_of_step", limit.loss, {}),
        moves("gradients", limit.gradient, gradients),
        moves("updates", limit.update, updates),
    )


FULL, HALF = 2**-20, 2**-8
"""Relative sizes of the nudge: the effect of rounding in float32, and in bfloat16."""
NUDGES = range(3)
"""Seeds of nudges. A single nudge may happen to move a gradient by a fiftieth of the others."""


def nudged(state: TrainState, size: float = FULL, seed: int = 0) -> TrainState:
    """Return a state on the host with each parameter changed by at most this fraction."""
    return replace(state, params=nudged_tree(state.params, size, seed))


def nudged_tree(tree: PyTree, size: float, seed: int) -> PyTree:
    """Return arrays on the host, with each floating-point element changed by at most `size`."""
    random = np.random.default_rng(seed)

    def nudge(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = random.uniform(-size, size, np.shape(leaf))
        return np.asarray(leaf * (1 + noise), leaf.dtype)

    return jax.tree.map(nudge, tree)


def limit_of(cuts: Sequence[str], terms: int) -> Differences:
    """Bound the effect of another order of summation, in float32.

    A sum of n terms rounds n times, at random: its relative error is about sqrt(n) 2**-24. Two such
    sums are compared, for each way in which the combination cuts them. The update may differ ten
    times as
    much: Adam divides by the gradient's size, and an update of 1e-3 added to a parameter of 1 is
    rounded by up to 6e-5 of itself.

    Args:
      cuts: the result of `cuts_of`.
      terms: number of terms in a gradient's sum: the tokens or examples of a batch.

    >>> limit_of(["over devices"], 512).gradient
    2.6973983046972182e-06
    """
    bound = 2 * len(cuts) * math.sqrt(max(terms, LAYER_TERMS)) * 2**-24
    return Differences(loss=bound, gradient=bound, update=10 * bound)


def half_limit_of(cuts: Sequence[str]) -> Differences:
    """Return the limits on differences where values are rounded to bfloat16.

    Each value has a rounding error of up to 2**-9 of itself, and a value that is rounded up in one
    order may be rounded down in another. A gradient is a long product of such values.
    """
    bound = len(cuts) * 2**-6
    return Differences(loss=bound, gradient=bound, update=2 * bound)
