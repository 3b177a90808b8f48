"""Three steps of training, and how far those of another plan are from them.

What differs between exact plans is the order in which floats are summed, and nothing else.
Three differences are measured, each relative, so that one bound serves any model:

- loss: of each step, to its value on one device;
- gradient: of the first step, as the optimizer receives it: for each parameter the norm of the
  difference to the norm on one device;
- update: parameters after the last step less the initial ones, in the same way.

All begin with the state that one device drew: that every mesh draws the same is held by tests.
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
"""Of the sums within a layer, which even a small batch has."""
COMPILE: Mapping[str, Json] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
"""The program that XLA plans is the same; its loops, which run three times, are made sooner."""


@dataclass(frozen=True)
class Differences:
    """Each relative to one device; the worst of all steps and parameters."""

    loss: float
    gradient: float
    update: float

    def within(self, limit: Differences) -> bool:
        """Whether none exceeds its limit; NaN does."""
        pairs = zip(astuple(self), astuple(limit), strict=True)
        return all(found <= bound for found, bound in pairs)


@dataclass(frozen=True)
class Trace:
    """What a run leaves to compare: arrays on the host, parameters by name.

    Attributes:
      initial: the training state that it began with.
      evaluation: the held-out loss after the last step; empty where there are no such examples.
    """

    initial: TrainState
    losses: np.ndarray
    gradients: Mapping[str, np.ndarray]
    updates: Mapping[str, np.ndarray]
    evaluation: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def loss_of_step(self) -> dict[str, np.ndarray]:
        """The losses, each by itself."""
        return {**{str(step): loss for step, loss in enumerate(self.losses)}, **self.evaluation}


class Noted(NamedTuple):
    """An optimizer's state, and with it the gradients that it was given last."""

    gradients: Grads
    inner: OptState


def noted(experiment: Experiment) -> Experiment:
    """The same experiment, with an optimizer whose state also holds the last step's gradients."""
    inner = experiment.program.optimizer.transform

    def init(params: Params) -> Noted:
        return Noted(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, Noted]:
        found, own = inner.update(updates, state.inner, params, **extra)
        # With master weights gradients are narrower than the parameters that `init` is given.
        kept = jax.tree.map(lambda g, old: g.astype(old.dtype), updates, state.gradients)
        return found, Noted(kept, own)

    transform = optax.GradientTransformationExtraArgs(init, update)
    optimizer = replace(experiment.program.optimizer, transform=transform)
    # Stages of one batch size share a program, which is then compiled once.
    programs: dict[int, Program] = {}
    for stage in experiment.stages:
        programs.setdefault(stage.batch_size, replace(stage.program, optimizer=optimizer))
    stages = tuple(replace(s, program=programs[s.batch_size]) for s in experiment.stages)
    program = replace(experiment.program, optimizer=optimizer)
    own = programs.get(experiment.config.train.batch_size, program)
    return replace(experiment, program=own, stages=stages)


@cache
def compile_options() -> JsonObject:
    """Those of `COMPILE` that this XLA has; the one of jax 0.12 lost some."""
    program = jax.jit(jnp.negative).lower(0)

    def known(name: str) -> bool:
        try:
            program.compile({name: COMPILE[name]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: COMPILE[name] for name in filter(known, COMPILE)}


def compiled_at() -> str:
    """What XLA compiles at here, for a heading."""
    level = compile_options().get("xla_backend_optimization_level", "its own")
    return f"XLA compiles at optimization level {level}"


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of an experiment that is `noted`, from any state, compiled once."""

    experiment: Experiment

    @cached_property
    def _steps(self) -> list[tuple[TrainStage, Any]]:
        """Each stage with its compiled step."""
        compiled: dict[int, Any] = {}
        for stage in self.experiment.stages:
            if stage.batch_size not in compiled:
                program = stage.program
                lowered = program.train.lower(program.state_shapes, program.batch)
                compiled[stage.batch_size] = lowered.compile(compile_options())
        return [(stage, compiled[stage.batch_size]) for stage in self.experiment.stages]

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """The compiled step and the batch of each of the first steps."""
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
        """The experiment's own initial state, on the host."""
        program = self.experiment.program
        state = jax.jit(program.init, compiler_options=compile_options())()
        return jax.device_get(program.home.used(state))

    def run(self, initial: TrainState) -> tuple[Trace, TrainState]:
        """Train for three steps: what is compared, and the last state as it is stored.

        Args:
          initial: on the host.
        """
        program = self.experiment.program
        shapes = replace(program.state_shapes, exchange=())
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        # Copied, since the step is given the memory of its state to reuse.
        stored = program.home.stored(jax.tree.map(np.array, replace(initial, exchange=())))
        state = jax.device_put(stored, shardings)
        state = replace(state, exchange=fresh_exchange(program))
        losses: list[float] = []
        gradients: dict[str, np.ndarray] = {}
        outer = program.outer
        for count, (step, batch) in enumerate(itertools.islice(self._batches(), STEPS), start=1):
            state, metrics = step(state, batch)
            losses.append(float(metrics[0]))
            if not gradients:
                gradients = _named(program.home.used(state).opt_state.gradients)
            if outer is not None and outer.due(count):
                state = program.between(state)
        # Evaluated before the state is read: what a step is given, it may reuse.
        evaluation = self._evaluation(state)
        first, last = _moving(initial), _moving(program.home.used(state))
        updates = {name: last[name] - first[name] for name in last}
        return Trace(initial, np.array(losses), gradients, updates, evaluation), state


def trace(experiment: Experiment, initial: TrainState | None = None) -> Trace:
    """Train for three steps and note what is compared.

    Args:
      experiment: one that is `noted`.
      initial: the state to begin with, on the host; None is the experiment's own.
    """
    steps = FirstSteps(experiment)
    return steps.run(steps.begin() if initial is None else initial)[0]


def _moving(state: TrainState) -> dict[str, np.ndarray]:
    """The parameters, and the buffers that hold numbers, by name."""
    buffers = {
        f"buffer {name}": leaf
        for name, leaf in _named(state.buffers).items()
        if np.issubdtype(leaf.dtype, np.floating)
    }
    return {**_named(state.params), **buffers}


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in flatten_with_names(tree)}


def differences(found: Trace, reference: Trace, least: NormFloors | None = None) -> Differences:
    """The three differences; NaN or infinite where a number is.

    Args:
      least: what a difference is measured by where that is more than the norm on one device.
    """

    def worst(field: str) -> float:
        """Of all tensors; what is 0 on one device must be 0."""
        ours, theirs = getattr(found, field), getattr(reference, field)
        leasts = getattr(least, field, {})
        distances = [
            _distance(ours[name], expected, leasts.get(name, 0.0))
            for name, expected in theirs.items()
            # The loss of a batch in which nothing has weight is NaN, and must be so on both.
            if not (field == "loss_of_step" and np.isnan(expected) and np.isnan(ours[name]))
        ]
        return math.nan if any(map(math.isnan, distances)) else max(distances, default=0.0)

    return Differences(worst("loss_of_step"), worst("gradients"), worst("updates"))


def _distance(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    off, norm = _norm(found - expected), max(_norm(expected), least)
    return off / norm if norm else (0.0 if off == 0 else math.inf)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


@dataclass(frozen=True)
class NormFloors:
    """For each tensor of a `Trace` the least norm that its difference is divided by."""

    loss_of_step: Mapping[str, float]
    gradients: Mapping[str, float]
    updates: Mapping[str, float]


SMALL = 1e-2
"""Part of the norm of all gradients, from which a tensor's own is judged by itself."""


def norms_at_least(
    reference: Trace, limit: Differences, *moved: Trace, times: float = 1.0
) -> NormFloors:
    """The scale of differences in ill-conditioned tensors, so that one limit serves all tensors.

    A gradient whose terms nearly cancel has the rounding of its terms, not of itself: one that is
    small beside all gradients is measured by a part of those, and the update that an optimizer
    makes of it is allowed as much more. And what moves by more than the limit when the initial
    parameters are off by their last digits, or when everything is computed in float32, is measured
    by how far it moves.

    Args:
      moved: the reference from `nudged` parameters, and the reference in float32 if it is narrower.
      times: how often that distance is allowed: two plans that round differently to bfloat16 are
        both off by as much as one of them is.
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
"""Relative sizes of the nudge: what rounding changes in float32, and in bfloat16."""
NUDGES = range(3)
"""Seeds of nudges. One alone may happen to move a gradient by a fiftieth of what others do."""


def nudged(state: TrainState, size: float = FULL, seed: int = 0) -> TrainState:
    """A state on the host with each parameter off by at most this part of itself, at random."""
    random = np.random.default_rng(seed)

    def nudge(leaf: np.ndarray) -> np.ndarray:
        noise = random.uniform(-size, size, np.shape(leaf))
        return np.asarray(leaf * (1 + noise), leaf.dtype)

    return replace(state, params=jax.tree.map(nudge, state.params))


def limit_of(cuts: Sequence[str], terms: int) -> Differences:
    """What another order of summation may change, in float32.

    A sum of n terms rounds n times, at random: its relative error is about sqrt(n) 2**-24. Two
    such sums are compared, for each way of cutting them that the combination has. The update may
    differ ten times as much: Adam divides by the gradient's size, and an update of 1e-3 that is
    added to a parameter of 1 is rounded by up to 6e-5 of itself.

    Args:
      cuts: as `cuts_of` names them.
      terms: of a gradient's sum: the tokens or examples of a batch.

    >>> limit_of(["over devices"], 512).gradient
    2.6973983046972182e-06
    """
    bound = 2 * len(cuts) * math.sqrt(max(terms, LAYER_TERMS)) * 2**-24
    return Differences(loss=bound, gradient=bound, update=10 * bound)


def half_limit_of(cuts: Sequence[str]) -> Differences:
    """Return the limits on differences where values are rounded to bfloat16.

    Each of them is off by up to 2**-9 of itself, and a value that one order rounds up another
    rounds down. A gradient is a long product of such values.
    """
    bound = len(cuts) * 2**-6
    return Differences(loss=bound, gradient=bound, update=2 * bound)
