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
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.experiment import Experiment
from jaxdist.train.checkpoints import fresh_exchange
from jaxdist.train.state import TrainState
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
    """

    initial: TrainState
    losses: np.ndarray
    gradients: Mapping[str, np.ndarray]
    updates: Mapping[str, np.ndarray]

    @property
    def loss_of_step(self) -> dict[str, np.ndarray]:
        """The losses, each by itself."""
        return {str(step): loss for step, loss in enumerate(self.losses)}


class Noted(NamedTuple):
    """An optimizer's state, and with it the gradients that it was given last."""

    gradients: Grads
    inner: OptState


def noted(experiment: Experiment) -> Experiment:
    """The same experiment, with an optimizer whose state also holds the last step's gradients."""
    program = experiment.program
    inner = program.optimizer.transform

    def init(params: Params) -> Noted:
        return Noted(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: object
    ) -> tuple[Updates, Noted]:
        found, own = inner.update(updates, state.inner, params, **extra)
        return found, Noted(updates, own)

    transform = optax.GradientTransformationExtraArgs(init, update)
    optimizer = replace(program.optimizer, transform=transform)
    return replace(experiment, program=replace(program, optimizer=optimizer))


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
    def _step(self) -> Any:
        program = self.experiment.program
        lowered = program.train.lower(program.state_shapes, program.batch)
        return lowered.compile(compile_options())

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
        with self.experiment.loader.batches() as batches:
            for batch in itertools.islice(batches, STEPS):
                state, metrics = self._step(state, batch)
                losses.append(float(metrics[0]))
                if not gradients:
                    gradients = _named(program.home.used(state).opt_state.gradients)
        first, last = _named(initial.params), _named(program.home.used(state).params)
        updates = {name: last[name] - first[name] for name in last}
        return Trace(initial, np.array(losses), gradients, updates), state


def trace(experiment: Experiment, initial: TrainState | None = None) -> Trace:
    """Train for three steps and note what is compared.

    Args:
      experiment: one that is `noted`.
      initial: the state to begin with, on the host; None is the experiment's own.
    """
    steps = FirstSteps(experiment)
    return steps.run(steps.begin() if initial is None else initial)[0]


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
        ]
        return math.nan if any(map(math.isnan, distances)) else max(distances)

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


def norms_at_least(reference: Trace, moved: Trace, limit: Differences) -> NormFloors:
    """The scale of differences in ill-conditioned tensors, so that one limit serves all tensors.

    A gradient whose terms nearly cancel has the rounding of its terms, not of itself: one that is
    small beside all gradients is measured by a part of those, and the update that an optimizer
    makes of it is allowed as much more. And what moves by more than the limit when the initial
    parameters are off by their last digits is measured by how far it moves.

    Args:
      moved: the reference from `nudged` parameters.
    """
    total = math.hypot(*map(_norm, reference.gradients.values()))
    gradients = dict.fromkeys(reference.gradients, SMALL * total)
    updates = {
        name: _norm(update) * max(1.0, gradients[name] / (_norm(reference.gradients[name]) or 1.0))
        for name, update in reference.updates.items()
    }

    def moves(field: str, bound: float, floors: Mapping[str, float]) -> dict[str, float]:
        ours, theirs = getattr(reference, field), getattr(moved, field)
        return {
            name: max(floors.get(name, 0.0), _norm(theirs[name] - value) / bound)
            for name, value in ours.items()
        }

    return NormFloors(
        moves("loss_of_step", limit.loss, {}),
        moves("gradients", limit.gradient, gradients),
        moves("updates", limit.update, updates),
    )


def nudged(state: TrainState, size: float = 2**-20) -> TrainState:
    """A state on the host with each parameter off by at most this part of itself, at random."""
    random = np.random.default_rng(0)

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
