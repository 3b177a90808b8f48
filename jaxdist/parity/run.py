"""Training of a combination, and its comparison with training on a single device.

The optimizer is AdamW with weight decay and clipping, so that the result depends on every tensor
and on the global norm across shards. AdamW's `eps` is large, because Adam divides by the size of a
gradient. With a small `eps`, an element whose gradient is only rounding noise would move by a full
step in a random direction. With `eps` far above the noise, the update is a smooth function of the
gradient, so that similar limits apply to the gradient and to the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import Document, validate
from jaxdist.errors import JaxdistError, first_line
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.functional import Functional, batch_norms
from jaxdist.parity.cells import DEVICES, MESHES, REMATS, Combination
from jaxdist.parity.trace import (
    STEPS,
    Differences,
    FirstSteps,
    Trace,
    limit_of,
    noted,
    trace_differences,
)
from jaxdist.train.state import TrainState
from jaxdist.types import Json, JsonObject

BUILT_IN: Mapping[str, Json] = {
    "model": {
        "type": "gpt", "layers": 8, "embed": 32, "heads": 4, "vocab_multiple": 8, "remat": "none",
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "window": 16, "vocab_size": 64,
        "heldout_examples": 0,
    },
    "train": {"batch_size": 32},
}  # fmt: skip
"""The config of the small language model that is compared if the user gives no config."""
OPTIM: Mapping[str, Json] = {
    "type": "adamw",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "eps": 1e-4,
}
COMMON = ("data", "loss", "optim", "strategy", "seed")
"""The sections of a config that a plan does not change."""


@dataclass(frozen=True)
class ParityResult:
    """The result of a comparison with a single device.

    Attributes:
      cell: the combination.
      verdict: "equal", "differs" or "skipped". A combination that XLA refuses to compile also
        differs.
      differences: the differences from a single device, or None if the combination was skipped or
        not compiled.
      limit: the limits on the differences, or None if `differences` is None.
      reason: the reason why there are no differences, or an empty string.
    """

    cell: Combination
    verdict: str
    differences: Differences | None = None
    limit: Differences | None = None
    reason: str = ""


@dataclass(frozen=True)
class ParitySubject:
    """The model to compare, with its results on a single device.

    Attributes:
      sections: the sections of the model's config, to which a combination adds its settings.
      initial: the initial state that a single device computes, as arrays on the host.
      reference: the results of three steps on a single device.
      terms: the number of tokens in a batch, or of examples if the data have no tokens.
    """

    sections: Mapping[str, Json]
    initial: TrainState
    reference: Trace
    terms: int


def without_values(section: Mapping[str, Json], *names: str) -> JsonObject:
    """Return the values of a section that do not have the given names."""
    return {name: value for name, value in section.items() if name not in names}


def single_device(sections: Mapping[str, Json]) -> JsonObject:
    """Return the sections of a config that trains the same model on a single device.

    The config has no remat, microbatches, or other settings that only a plan changes.
    """
    plain = {name: sections[name] for name in COMMON if name in sections}
    model = without_values(sections["model"], "remat")
    if "attention" in model:
        model["attention"] = "plain"
    loss = without_values(sections.get("loss") or {}, "chunks")
    sharding = {**sections.get("sharding", {}), "rules": {}, "collective_matmul": False}
    return {
        **plain,
        **({"loss": loss} if loss else {}),
        "model": model,
        "train": {**sections["train"], "microbatches": 1},
        "mesh": {"data": 1, "fake_devices": 1},
        "sharding": sharding,
    }


def in_half_precision(config: JsonObject) -> bool:
    """Return whether a config has another dtype than float32 for any of its values."""
    parallel = config.get("parallel", {})
    dtypes = (
        config["model"].get("compute_dtype"),
        config["optim"].get("master_weights"),
        parallel.get("reduce_dtype"),
        (parallel.get("zero") or {}).get("gather_dtype"),
    )
    return any(dtype not in (None, "float32") for dtype in dtypes)


def in_full_precision(config: JsonObject) -> JsonObject:
    """Return a config with all values in float32.

    Only the dtypes of the sections `model` and `optim` change.
    """
    model = without_values(config["model"], "compute_dtype")
    return {**config, "model": model, "optim": without_values(config["optim"], "master_weights")}


def open_reference(sections: Mapping[str, Json]) -> ParitySubject:
    """Train on a single device, and return the subject with which combinations are compared.

    Raises:
      JaxdistError: the config cannot be built on a single device.
    """
    steps = FirstSteps(experiment_of(single_device(sections)))
    initial = steps.begin()
    return ParitySubject(sections, initial, steps.run(initial)[0], steps.experiment.units_per_step)


def sections_of(document: Document, config: ExperimentConfig) -> JsonObject:
    """Return the sections of a user's config that describe its model and data, in float32.

    Args:
      document: the config as it was read.
      config: the validated config.
    """
    kept = ("data", "loss", "sharding", "seed")
    values = {name: document.values[name] for name in kept if name in document.values}
    fields = type(config.model).model_fields
    float32 = {"compute_dtype": "float32", "attention": "plain", "remat": "none"}
    model = {name: value for name, value in float32.items() if name in fields}
    return {
        **values,
        "model": {**document.values["model"], **model},
        "train": {"batch_size": config.train.batch_size},
    }


def remats_of(sections: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the keys of `REMATS` that a config's model supports.

    A model without remat supports only "none".
    """
    return tuple(REMATS) if "remat" in sections["model"] else ("none",)


def with_combination(sections: Mapping[str, Json], cell: Combination) -> JsonObject:
    """Return the sections of a config with the settings of a combination."""
    model, sharding = dict(sections["model"]), sections.get("sharding", {})
    if "remat" in model:
        remat = REMATS[cell.remat]
        model["remat"] = [*remat][: model.get("layers")] if isinstance(remat, tuple) else remat
    rules = without_values(sharding.get("rules", {}), "residual_seq")
    return {
        **sections,
        "model": model,
        "mesh": {**MESHES[cell.mesh], "fake_devices": DEVICES},
        "sharding": {**sharding, "rules": {**rules, **cell.rules}},
        "train": {**sections["train"], "microbatches": cell.microbatches},
        "parallel": cell.parallel,
    }


def built(sections: Mapping[str, Json], *, traced: bool = True) -> Experiment:
    """Build the experiment of a config on the config's fake devices.

    The state of its optimizer also keeps the last gradients; see `noted`.

    Args:
      sections: the sections of the config.
      traced: whether to trace the step before it is compiled; see `jaxdist.experiment.build`.
    """
    config = validate(Document(dict(sections)), ExperimentConfig)
    devices = jax.devices()[: config.mesh.fake_devices]
    return noted(build(config, devices=devices, traced=traced))


def experiment_of(sections: Mapping[str, Json]) -> Experiment:
    """Build the experiment of a combination's sections, with the optimizer of all combinations.

    Raises:
      JaxdistError: the model or the batch does not fit the combination.
    """
    return built({**sections, "train": {**sections["train"], "steps": STEPS}, "optim": OPTIM})


def is_random(model: Functional) -> bool:
    """Return whether a model has random layers."""
    module = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    return bool(jax.tree.leaves(nnx.state(module, nnx.RngState)))


def inexact(model: Functional, *, reduce: bool, microbatches: int) -> str:
    """Return why a model gives other numbers for a batch in parts than for the whole batch at once.

    The result is empty if the numbers are the same, or if the batch is computed at once.

    Args:
      model: the model to judge.
      reduce: whether gradients are reduced explicitly, so that each device computes a part of the
        batch.
      microbatches: the number of parts into which a batch is divided.
    """
    if not reduce and microbatches == 1:
        return ""
    if is_random(model):
        return "random layers draw for each part of the batch separately"
    module = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    if microbatches > 1 and batch_norms(module):
        return "batch statistics are those of a microbatch"
    others = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.BatchStat)))
    # A model with `settle` is exact, because `settle` moves the buffers by sums over the whole
    # batch.
    if model.settle is None and any(
        jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(others)
    ):
        return "state that the model keeps may depend on how the batch is split"
    return ""


def compare_combination(subject: ParitySubject, cell: Combination) -> ParityResult:
    """Train a combination, and return its comparison with a single device.

    A combination is skipped if the model cannot be built, for example because axis tensor does not
    divide its heads. A combination is also skipped if the model gives other numbers for a batch in
    parts than for the batch at once. If XLA refuses to compile a combination, the verdict is
    "differs", and the reason is the first line of XLA's message.
    """
    try:
        experiment = experiment_of(with_combination(subject.sections, cell))
    except JaxdistError as error:
        return ParityResult(cell, "skipped", reason=" ".join(str(error).split()))
    parts = {"reduce": cell.reduce is not None, "microbatches": cell.microbatches}
    reason = inexact(experiment.program.model, **parts)
    if reason:
        return ParityResult(cell, "skipped", reason=reason)
    try:
        # The combination begins with the state that the single device initialized.
        trace, _ = FirstSteps(experiment).run(subject.initial)
    except jax.errors.JaxRuntimeError as error:
        return ParityResult(cell, "differs", reason=first_line(error))
    found = trace_differences(trace, subject.reference)
    limit = limit_of(cell.cuts, subject.terms)
    return ParityResult(cell, "equal" if found.within(limit) else "differs", found, limit)
