"""Muon on plans drawn at random, each resumed on another plan, compared with one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.core.report import Figure
from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment
from jaxdist.parity.run import built, single_device
from jaxdist.parity.states import NUDGES, leaves_by_name, nudged, reloaded
from jaxdist.parity.trace import STEPS, FirstSteps
from jaxdist.train.state import TrainState
from jaxdist.types import JsonObject

DRAWS, BOUND, LAST_PLACE = 6, 1e-6, 2**-23
SECTIONS: JsonObject = {
    "data": {
        "type": "synthetic", "kind": "tokens", "window": 16, "vocab_size": 64,
        "heldout_examples": 0,
    },
    "train": {"steps": 2 * STEPS, "batch_size": 24},
}  # fmt: skip
MODELS: tuple[JsonObject, ...] = (
    {"layers": 4, "optim": {"scale": "match_rms", "split_heads": True}},
    {"layers": 6, "optim": {"scale": "spectral", "nesterov": False}},
)
"""The number of layers and the settings of Muon of each model."""
Sizes = tuple[int, int, int, int]
"""The sizes of the axes data, tensor and stage, and the stage of ZeRO."""


def config(model: int, sizes: Sizes) -> JsonObject:
    """Return the config of a model on a plan."""
    data, tensor, stage, zero = sizes
    layers, optim = MODELS[model]["layers"], MODELS[model]["optim"]
    axes = {"data": data, "tensor": tensor, "stage": stage}
    pipeline = {"pipeline": {"schedule": {"type": "1f1b"}}} if stage > 1 else {}
    return {
        **SECTIONS,
        "model": {"type": "gpt", "layers": layers, "embed": 32, "heads": 4, "vocab_multiple": 8},
        "optim": {"type": "muon", "learning_rate": 1e-2, "adamw": {"eps": 1e-3}, **optim},
        "train": {**SECTIONS["train"], "microbatches": 2 if stage > 1 else 1},
        "mesh": {**axes, "fake_devices": data * tensor * stage},
        "parallel": {"zero": {"stage": zero}, "reduce": {"type": "xla"}, **pipeline},
    }


def drawn(random: Random, model: int) -> tuple[Sizes, Experiment]:
    """Draw a plan on 2 to 8 devices that jaxdist accepts, and build it."""
    while True:
        sizes = (random.choice((1, 2, 3, 4)), random.choice((1, 2)), random.choice((1, 2)),
                 random.randrange(4))  # fmt: skip
        if 2 <= sizes[0] * sizes[1] * sizes[2] <= 8:
            try:
                return sizes, built(config(model, sizes))
            except JaxdistError:
                continue  # The validity table refuses the plan.


class Alone(NamedTuple):
    """The training of a model on one device.

    Attributes:
      begun: the first state.
      losses: the loss of each step.
      params: the last parameters, by name.
      rounding: the largest relative change of the last parameters if the first parameters change by
        a unit in the last place.
    """

    begun: TrainState
    losses: Sequence[np.ndarray]
    params: Mapping[str, np.ndarray]
    rounding: float


@cache
def alone(model: int) -> Alone:
    """Train a model on one device, once more with first parameters that differ by rounding."""
    steps = FirstSteps(built(single_device(config(model, (1, 1, 1, 0)))))
    begun = steps.begin()
    losses, params = twice(steps, steps, begun)
    moved = [twice(steps, steps, nudged(begun, LAST_PLACE, seed))[1] for seed in NUDGES]
    return Alone(begun, losses, params, max(apart(one, params) for one in moved))


def twice(
    first: FirstSteps, second: FirstSteps, begun: TrainState
) -> tuple[list[np.ndarray], Mapping[str, np.ndarray]]:
    """Train a few steps on a plan, resume on a second plan, and return losses and parameters."""
    one, state = first.run(begun)
    target = second.experiment.program
    state = reloaded(first.experiment.program, state, target)
    other, state = second.run(jax.device_get(target.home.used(state)))
    last = jax.device_get(target.home.used.params(state.params))
    return [*one.values.values(), *other.values.values()], leaves_by_name(last)


def apart(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> float:
    """Return the largest ratio of the norm of a parameter's difference to the parameter's norm."""
    norm = np.linalg.norm
    return float(max(norm(found[name] - x) / norm(x) for name, x in right.items()))


def figures(draws: int = DRAWS) -> Iterator[Figure]:
    """Compare losses and parameters of drawn plans with one device, before and after a resume."""
    losses, params, rounding, plans = 0.0, 0.0, 0.0, []
    for seed in range(draws):
        random, model = Random(seed), seed % len(MODELS)
        (sizes, first), (other, second) = drawn(random, model), drawn(random, model)
        right = alone(model)
        found, last = twice(FirstSteps(first), FirstSteps(second), right.begun)
        pairs = zip(found, right.losses, strict=True)
        losses = max(losses, *(float(abs(a / b - 1)) for a, b in pairs))
        params, rounding = max(params, apart(last, right.params)), max(rounding, right.rounding)
        plans.append(f"{sizes} to {other}")
    note = (
        f"largest relative difference from one device; {STEPS} steps on a plan, {STEPS} resumed on "
        f"another; (data, tensor, stage, ZeRO): {'; '.join(plans)}"
    )
    name = f"Muon, {draws} plans drawn"
    yield Figure(f"{name}: losses", losses, BOUND, goal="<= 1", unit="", note=note)
    note = "the reference: one device, if its first parameters change in their last place"
    yield Figure(f"{name}: parameters", params, rounding, goal="<= 2", unit="", note=note)
