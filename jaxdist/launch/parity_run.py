"""Three steps of one combination against three on one device.

What differs between exact combinations is the order in which floats are summed, and nothing else.
Three differences are measured, each relative, so that one bound serves any model:

- loss: of each step, to its value on one device;
- gradient: of the first step, as the optimizer receives it (read from Adam's first moment, which
  is then a tenth of it): for each parameter the norm of the difference to the norm on one device;
- update: parameters after the last step less the initial ones, in the same way.

All begin with the state that one device drew: that every mesh draws the same is held by tests.

The optimizer is AdamW with weight decay and clipping, so that every tensor and the global norm
across shards matter. Its `eps` is large: Adam divides by the size of a gradient, so that an element
that is rounding noise would step at full length in a random direction; with eps far above the noise
the update is a smooth function of the gradient, and bounded like it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist.config import Document, validate
from jaxdist.errors import JaxdistError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.launch.parity_cells import DEVICES, MESHES, REMATS, Cell
from jaxdist.models.functional import Functional
from jaxdist.train.state import TrainState
from jaxdist.trees import flatten_with_names

STEPS = 3
LAYER_TERMS = 512
"""Of the sums within a layer, which even a small batch has."""
BUILT_IN: Mapping[str, Any] = {
    "model": {
        "type": "gpt", "layers": 8, "embed": 32, "heads": 4, "vocab_multiple": 8, "remat": "none",
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "window": 16, "vocab_size": 64,
        "heldout_examples": 0,
    },
    "train": {"batch_size": 32},
}  # fmt: skip
"""Sections of the small language model that is compared where no config is given."""
COMPILE: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
"""The program that XLA plans is the same; its loops, which run three times, are made sooner."""
OPTIM: Mapping[str, Any] = {
    "type": "adamw",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "eps": 1e-4,
}


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


@dataclass(frozen=True)
class Result:
    """One combination and how it went: "equal", "differs", or "skipped" with the reason.

    What XLA does not compile differs too: it has a reason and no differences.
    """

    cell: Cell
    verdict: str
    differences: Differences | None = None
    limit: Differences | None = None
    reason: str = ""


@dataclass(frozen=True)
class Subject:
    """What is trained: the sections of a config that no combination changes.

    Attributes:
      sections: as in a config file.
      reference: three steps on one device.
      terms: tokens or examples in a batch.
      inexact: what makes a combination with a reduction or with microbatches another computation;
        empty where nothing does.
    """

    sections: Mapping[str, Any]
    reference: Trace
    terms: int
    inexact: str


def open_subject(sections: Mapping[str, Any]) -> Subject:
    """Train on one device, which all combinations are compared with.

    Raises:
      JaxdistError: the config cannot be built on one device.
    """
    experiment = _experiment(sections, {"data": 1}, remat="none")
    reason = inexact(experiment.program.model)
    return Subject(sections, trace(experiment), experiment.units_per_step, reason)


def sections_of(document: Document, config: ExperimentConfig) -> dict[str, Any]:
    """A user's config, float32 throughout, without what the combinations set themselves."""
    kept = ("data", "loss", "sharding", "seed")
    values = {name: document.values[name] for name in kept if name in document.values}
    fields = type(config.model).model_fields
    float32 = {"compute_dtype": "float32", "attention": "xla", "remat": "none"}
    model = {name: value for name, value in float32.items() if name in fields}
    return {
        **values,
        "model": {**document.values["model"], **model},
        "train": {"batch_size": config.train.batch_size},
    }


def remats_of(sections: Mapping[str, Any]) -> tuple[str, ...]:
    """What the backward pass of the model can recompute; nothing where it has no such choice."""
    return tuple(REMATS) if "remat" in sections["model"] else ("none",)


def _experiment(
    sections: Mapping[str, Any], mesh: Mapping[str, Any], remat: str, **others: Any
) -> Experiment:
    """Builds what `sections` describe; `others` are sections too, or replace fields of them."""
    model, train = sections["model"], {**sections["train"], "steps": STEPS}
    if len(remats_of(sections)) > 1:
        model = {**model, "remat": REMATS[remat]}
    whole = {**sections, "model": model, "train": train, "optim": OPTIM, "mesh": mesh}
    for name, section in others.items():
        whole[name] = {**whole.get(name, {}), **section}
    config = validate(Document(whole), ExperimentConfig)
    count = 1 if mesh == {"data": 1} else DEVICES
    return build(config, devices=jax.devices()[:count])


def experiment_of(sections: Mapping[str, Any], cell: Cell) -> Experiment:
    """Build the sections of a config as a combination has them; nothing is compiled.

    Raises:
      JaxdistError: the model or the batch does not go with the combination.
    """
    sharding = sections.get("sharding", {})
    return _experiment(
        sections,
        MESHES[cell.mesh],
        cell.remat,
        parallel=cell.parallel,
        sharding={"rules": {**sharding.get("rules", {}), **cell.rules}},
        train={"microbatches": cell.microbatches},
    )


def inexact(model: Functional) -> str:
    """Why a batch in parts is not the same computation as a whole one; empty where it is."""
    module = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    if jax.tree.leaves(nnx.state(module, nnx.RngState)):
        return "random layers draw anew for each part of the batch"
    buffers = jax.tree.leaves(model.buffers)
    if any(jnp.issubdtype(buffer.dtype, jnp.inexact) for buffer in buffers):
        return "batch statistics are those of a part of the batch"
    return ""


@cache
def compile_options() -> dict[str, Any]:
    """Those of `COMPILE` that this XLA has; the one of jax 0.12 lost some."""
    program = jax.jit(jnp.negative).lower(0)

    def known(name: str) -> bool:
        try:
            program.compile({name: COMPILE[name]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: COMPILE[name] for name in filter(known, COMPILE)}


def trace(experiment: Experiment, initial: TrainState | None = None) -> Trace:
    """Train for three steps and note what is compared.

    Args:
      initial: the state to begin with, on the host; None is the experiment's own.
    """
    program, options = experiment.program, compile_options()
    step = program.train.lower(program.state_shapes, program.batch).compile(options)
    begun = initial
    if begun is None:
        begun = jax.device_get(
            program.storage.used(jax.jit(program.init, compiler_options=options)())
        )
    shardings = jax.tree.map(lambda shape: shape.sharding, program.state_shapes)
    # Copied, since the step is given the memory of its state to reuse.
    state = jax.device_put(program.storage.stored(jax.tree.map(np.array, begun)), shardings)
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    with experiment.loader.batches() as batches:
        for batch in itertools.islice(batches, STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics[0]))
            if not gradients:
                opt_state = program.storage.used(state).opt_state
                gradients = _named(optax.tree_utils.tree_get(opt_state, "mu"))
    first, last = _named(begun.params), _named(program.storage.used(state).params)
    updates = {name: last[name] - first[name] for name in last}
    return Trace(begun, np.array(losses), gradients, updates)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in flatten_with_names(tree)}


def differences(found: Trace, reference: Trace) -> Differences:
    """The three differences; NaN or infinite where a number is."""
    loss = np.max(np.abs(found.losses / reference.losses - 1))
    return Differences(
        float(loss),
        _worst(found.gradients, reference.gradients),
        _worst(found.updates, reference.updates),
    )


def _worst(found: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """The largest relative distance of any parameter; what is 0 on one device must be 0."""
    distances = [_distance(found[name], expected) for name, expected in reference.items()]
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    off, norm = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    return off / norm if norm else (0.0 if off == 0 else math.inf)


def limit_of(cell: Cell, terms: int) -> Differences:
    """What another order of summation may change, in float32.

    A sum of n terms rounds n times, at random: its relative error is about sqrt(n) 2**-24. Two
    such sums are compared, for each way of cutting them that the combination has. The update may
    differ ten times as much: Adam divides by the gradient's size, and an update of 1e-3 that is
    added to a parameter of 1 is rounded by up to 6e-5 of itself.

    Args:
      terms: of a gradient's sum: the tokens or examples of a batch.

    >>> limit_of(Cell("data 8", 0, "all", None, 1, "none"), 512).gradient
    2.6973983046972182e-06
    """
    bound = 2 * len(cell.cuts) * math.sqrt(max(terms, LAYER_TERMS)) * 2**-24
    return Differences(loss=bound, gradient=bound, update=10 * bound)


def compare(subject: Subject, cell: Cell) -> Result:
    """Train one combination and judge it.

    A combination that the model cannot be built for (its heads do not divide over the mesh, say),
    or that makes its layers compute something else, is skipped with the reason. One that XLA
    refuses differs, with the first line of what it says.
    """
    if subject.inexact and (cell.reduce is not None or cell.microbatches > 1):
        return Result(cell, "skipped", reason=subject.inexact)
    try:
        experiment = experiment_of(subject.sections, cell)
    except JaxdistError as error:
        return Result(cell, "skipped", reason=" ".join(str(error).split()))
    begun = subject.reference.initial
    try:
        found = differences(trace(experiment, begun), subject.reference)
    except jax.errors.JaxRuntimeError as error:
        return Result(cell, "differs", reason=str(error).splitlines()[0])
    limit = limit_of(cell, subject.terms)
    return Result(cell, "equal" if found.within(limit) else "differs", found, limit)
