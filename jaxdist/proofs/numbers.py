"""The comparison of training with a plan and training on a single device, for a reduced config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxdist.errors import JaxdistError
from jaxdist.models.mean import scalars_in
from jaxdist.parity import trace
from jaxdist.parity.cells import plan_cuts
from jaxdist.parity.run import built, inexact, is_random, single_device
from jaxdist.parity.states import (
    NUDGES,
    leaves_by_name,
    nudged,
    place_state,
    reloaded,
    replicas_apart,
    updates_of,
)
from jaxdist.parity.trace import Differences, FirstSteps, Trace
from jaxdist.parity.weighted import WEIGHTS, with_weights
from jaxdist.proofs.draws import Batch, repeated
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.types import Json, JsonObject, PyTree

RESUMED = "resumed step"
"""The name of the step before which the state is saved and loaded."""
Scenes = Mapping[str, np.ndarray | None]
"""The weights of the batch's examples, float32 `[B]`, in each step of a comparison, by the step's
name. A batch with None has no weights."""
KINDS = "values", "gradient", "update"
"""The kinds of a `Quantity`, in the order of the fields of `Differences`."""


@dataclass(frozen=True)
class Quantity:
    """The difference of a value between a plan and a single device.

    Attributes:
      kind: "gradient", "update" (the change of a parameter or buffer), or "values" (a metric or a
        result of evaluation).
      name: the name of the parameter, buffer or metric.
      step: the name of the step in which the difference is largest.
      off: the relative difference, which is infinite if only one of the two values is NaN.
      limit: the largest difference that another order of summation explains.
    """

    kind: str
    name: str
    step: str
    off: float
    limit: float

    @property
    def equal(self) -> bool:
        """Whether the order of summation explains the difference."""
        return self.off <= self.limit


@dataclass(frozen=True)
class Compared:
    """The comparison of a plan with a single device.

    Attributes:
      plan: a name for the plan.
      quantities: for each value, the largest difference over all steps.
      undecided: the reason why the plan was not compared, or an empty string if it was compared.
      steps: the names of the compared steps.
    """

    plan: str
    quantities: tuple[Quantity, ...] = ()
    undecided: str = ""
    steps: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Quantity, ...]:
        """The values that differ from the values of a single device."""
        return tuple(one for one in self.quantities if not one.equal)


def scenes(rows: int, shards: int, *, weighted: bool, skips: bool, seed: int) -> Scenes:
    """Return the steps to compare.

    Without weights, there are two steps, and a third step, before which the state is saved and
    loaded. With weights, there are also a step in which all weights of a shard are 0, a step in
    which all weights are 0, and, with `skips`, a step with a gradient of NaN.

    Args:
      rows: the number of rows of a batch.
      shards: the number of devices that share the batch.
      weighted: whether examples have weights.
      skips: whether the optimizer skips a step whose gradient is NaN.
      seed: the seed of the weights.
    """
    if not weighted:
        return dict.fromkeys(("first step", "second step", RESUMED))
    random = np.random.default_rng(seed)

    def unequal() -> np.ndarray:
        # Some weights are zero, and the sum of weights is not the same on any two devices.
        return random.permutation(np.resize(WEIGHTS, rows) + np.linspace(0, 0.5, rows))

    empty = unequal().reshape(shards, -1)
    empty[random.integers(shards)] = 0 if shards > 1 else 1
    found = {
        "unequal weights": unequal(),
        "an empty shard": empty.reshape(-1),
        RESUMED: unequal(),
        "no weight": np.zeros(rows),
        **({"not a number": np.full(rows, np.nan)} if skips else {}),
        "after skipping": unequal(),
    }
    return {name: weights.astype(np.float32) for name, weights in found.items()}


class Steps(FirstSteps):
    """The compiled step of an experiment that `jaxdist.parity.run.built` returns."""

    @cached_property
    def batches(self) -> list[Mapping[str, np.ndarray]]:
        """The first 8 batches on the host, which are the same for every plan."""
        loader = self.experiment.loader
        return [jax.device_get(loader.batch(step)) for step in range(8)]

    def loss(self, initial: TrainState, host: Mapping[str, np.ndarray]) -> float:
        """Return the loss of a step that begins from a state on the host."""
        program = self.experiment.program
        _, metrics = self._take(place_state(program, initial), host)
        return float(metrics[program.metrics.index("loss")])

    def _take(self, state: TrainState, host: Mapping[str, np.ndarray]) -> tuple[TrainState, Any]:
        shapes = self.experiment.program.batch
        batch = {name: jax.device_put(x, shapes[name].sharding) for name, x in host.items()}
        return self.compiled(state, batch)

    def take(self, initial: TrainState, taken: Scenes, *, reload: bool) -> list[Trace]:
        """Take a step for each scene, evaluate, and return the results of the steps and evaluation.

        Args:
          initial: the initial state on the host.
          taken: the steps of the comparison, as `scenes` returns them.
          reload: whether to save and load the state before the step `RESUMED`.
        """
        program, traces = self.experiment.program, []
        state, before = place_state(program, initial), initial
        steps = enumerate(zip(taken.items(), self.batches, strict=False), start=1)
        for count, ((name, weights), host) in steps:
            if name == RESUMED and reload:
                state = reloaded(program, state, program)
            given = host if weights is None else {**host, "weight": weights}
            state, metrics = self._take(state, given)
            state = self.between(state, count)
            used = jax.device_get(program.home.used(state))
            # Gradients of NaN cannot be compared. The parameters show whether the step was skipped.
            numbers = weights is None or np.isfinite(weights).all()
            gradients = leaves_by_name(used.opt_state.gradients) if numbers else {}
            values = dict(zip(program.metrics, np.asarray(metrics, np.float64), strict=True))
            updates = updates_of(before, used)
            traces.append(Trace(values | apart(state), gradients, updates))
            before = used
        means = {f"evaluation {name}": np.asarray(x) for name, x in self.means(state).items()}
        return [*traces, Trace(means)]


def apart(state: PyTree) -> dict[str, np.ndarray]:
    """Return the largest difference between replicas, under its name in a `Trace`.

    The result is empty if all replicas have equal bits, as on a single device. A plan whose results
    have this value therefore differs from a single device.
    """
    off, leaf = replicas_apart(state)
    return {f"replicas of {leaf}": np.asarray(off)} if off else {}


@dataclass
class Reference:
    """The training on a single device with which plans for the same model are compared.

    The single device takes its steps once for each batch size and number of shards, and later
    comparisons use the same results.

    Attributes:
      sections: the sections of the reduced config.
      weighted: whether examples have unequal weights.
      seed: the seed of the weights.
    """

    sections: JsonObject
    weighted: bool
    seed: int = 0
    _known: dict[tuple[int, int], list[list[Trace]]] = field(default_factory=dict)

    @cached_property
    def steps(self) -> Steps:
        """The compiled step on a single device."""
        return Steps(built(single_device(self._data(self.sections))))

    @cached_property
    def initial(self) -> TrainState:
        """The initial state on the host, which is the same for every plan."""
        return self.steps.begin()

    def _data(self, sections: JsonObject) -> JsonObject:
        return {**sections, "data": with_weights(sections["data"])} if self.weighted else sections

    def compare(self, plan: str, sections: JsonObject) -> tuple[Compared, Any]:
        """Compare a plan with a single device that has the same model, optimizer and batch.

        The result is a pair of the comparison and the plan's `Steps`. If the plan cannot be built,
        or may differ from a single device, the plan is not compared, and the pair has None instead
        of the `Steps`.

        Args:
          plan: a name for the plan.
          sections: the sections of the plan's reduced config.
        """
        try:
            steps = Steps(built(self._data(sections)))
            reason = _other(sections, self.steps.experiment.program, weighted=self.weighted)
        except JaxdistError as error:
            return Compared(plan, undecided=" ".join(str(error).split())), None
        limit = trace.limit_of(plan_cuts(sections), steps.experiment.units_per_step)
        draws = self._draws(steps, sections, limit.loss)
        if reason:
            return Compared(plan, draws, reason), None
        rows, shards = sections["train"]["batch_size"], steps.experiment.layout.data_size
        skips = any(sections["optim"].get(name) for name in ("skip_nonfinite", "loss_scale"))
        taken = scenes(rows, shards, weighted=self.weighted, skips=skips, seed=self.seed)
        if (rows, shards) not in self._known:
            begins = self.initial, *(nudged(self.initial, seed=seed) for seed in NUDGES)
            self._known[rows, shards] = [self.steps.take(b, taken, reload=False) for b in begins]
        found = steps.take(self.initial, taken, reload=True)
        names = (*taken, "evaluation")
        worst = worst_of(names, found, *self._known[rows, shards], limit=limit)
        return Compared(plan, (*worst, *draws), steps=names), steps

    def _draws(self, steps: Steps, sections: JsonObject, limit: float) -> tuple[Quantity, ...]:
        """Return a wrong `Quantity` for each repeated random number (see `draws.repeated`).

        Args:
          steps: the compiled step of the plan.
          sections: the sections of the plan's reduced config.
          limit: the relative difference that another order of summation explains.
        """
        program, batch = steps.experiment.program, steps.batches[0]
        alone = sections["strategy"]["type"] == "parameter_server"
        if self.weighted or alone or not is_random(program.model):
            return ()

        def loss(batch: Batch, later: int, seeds: int) -> float:
            other = {**sections, "seed": sections["seed"] + seeds}
            taken = Steps(built(other)) if seeds else steps
            state = replace(self.initial, step=self.initial.step + later)
            return taken.loss(state, batch)

        microbatches, devices = sections["train"]["microbatches"], steps.experiment.layout.data_size
        found = repeated(loss, batch, microbatches=microbatches, devices=devices, limit=limit)
        return tuple(Quantity("values", name, "first step", math.inf, limit) for name in found)


def _other(sections: Mapping[str, Json], program: Program, *, weighted: bool) -> str:
    """Return the reason why a plan's numbers may differ from the numbers of a single device.

    The result is empty if the numbers must be equal.

    Args:
      sections: the sections of the plan's reduced config.
      program: the program of the model on a single device.
      weighted: whether examples have unequal weights.
    """
    if sections["strategy"]["type"] == "parameter_server":
        return "the workers of strategy parameter_server exchange parameters between processes"
    if weighted and scalars_in(program.measured):
        return "the loss returns a scalar, which does not say its weight: return a jaxdist.Mean"
    reduce, microbatches = sections["parallel"]["reduce"], sections["train"]["microbatches"]
    return inexact(program.model, reduce=reduce is not None, microbatches=microbatches)


def worst_of(
    names: Sequence[str], found: Sequence[Trace], *expected: Sequence[Trace], limit: Differences
) -> tuple[Quantity, ...]:
    """Return the largest difference of each value over all steps.

    Args:
      names: the names of the steps.
      found: the plan's results of each step.
      expected: the results of each step on a single device, then the results of other runs on a
        single device, one sequence for each `nudged` initial state.
      limit: the limits on differences.
    """
    worst: dict[tuple[str, str], Quantity] = {}
    for step, ours, theirs, *moved in zip(names, found, *expected, strict=True):
        least = trace.norms_at_least(theirs, limit, *moved)
        distances = trace.trace_distances(ours, theirs, least)
        for kind, offs, bound in zip(KINDS, distances.values(), astuple(limit), strict=True):
            for name, off in offs.items():
                # The largest difference is chosen later, and NaN is not larger than any number, so
                # NaN becomes infinite.
                one = Quantity(kind, name, step, math.inf if math.isnan(off) else off, bound)
                worst[kind, name] = max(worst.get((kind, name), one), one, key=lambda q: q.off)
    return tuple(worst.values())
