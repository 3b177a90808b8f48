"""The effect of a knob, from a comparison of the train step with the step without the knob."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Literal

import jax

from jaxdist.audit.knobs import (
    config_refusal,
    knob_neighbours,
    reason_not_in_the_step,
    with_value,
    without,
)
from jaxdist.config import Document, KeyPath, dotted, validate, value_at
from jaxdist.config.importing import load_object
from jaxdist.cost.step_time import StepTime
from jaxdist.errors import ConfigError, RunError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import Ledger
from jaxdist.inspect.diff import difference
from jaxdist.inspect.program import InspectedExperiment, Inspection, inspect_step
from jaxdist.inspect.rows import show_number
from jaxdist.inspect.text import program_digest
from jaxdist.metrics.report import PACKAGES
from jaxdist.models.build import default_loss
from jaxdist.parallel.compiler import OptionValue
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

KnobVerdict = Literal["ok", "default", "required", "not in the step", "NO EFFECT"]

Costs = Mapping[tuple[str, str], float]
"""The costs of a step, by name and unit."""
LAYOUT = ("mesh", "parallel", "sharding")
"""The sections that request a layout. The StableHLO of a step repeats a request for a layout, and
only the compiled program shows whether the request has an effect."""


@dataclass(frozen=True)
class KnobEffect:
    """The effect of a knob on the train step.

    Attributes:
      knob: the knob's dotted path.
      value: the knob's value in the config.
      origin: the file and line, or the override, that sets the knob.
      verdict: "ok" if the knob has an effect, "NO EFFECT" if the knob should have an effect and has
        none, or the reason why the knob needs no effect.
      effect: a description of the effect, or the reason why the effect was not examined.
    """

    knob: str
    value: Json
    origin: str
    verdict: KnobVerdict
    effect: str


def facts_of(subject: InspectedExperiment) -> JsonObject:
    """Return the versions, the config and the devices of an audit, for its report."""
    return {
        "versions": environment.versions((*PACKAGES, "libtpu")) | {"platform": platform.platform()},
        "config": subject.name,
        "devices": {"kind": subject.device_kind, "count": len(subject.devices)},
    }


class AuditedStep:
    """A train step, which is lowered and compiled at first use.

    Args:
      document: the config as it was read.
      config: the validated config.
      subject: the experiment of the config.
    """

    def __init__(
        self, document: Document, config: ExperimentConfig, subject: InspectedExperiment
    ) -> None:
        self.document, self.config, self.subject = document, config, subject

    @cached_property
    def lowered(self) -> str:
        """The StableHLO of the step for all batch sizes of the run.

        A run with a ramp of the batch size has several batch sizes.
        """
        stages = {stage.batch_size: stage.program for stage in self.subject.experiment.stages}
        programs = {self.config.train.batch_size: self.subject.experiment.program} | stages
        return "\n".join(
            p.train.lower(p.state_shapes, p.batch).as_text() for p in programs.values()
        )

    @cached_property
    def initial(self) -> str:
        """The StableHLO of the function that initializes the state."""
        return jax.jit(self.subject.experiment.program.init).lower().as_text()

    @cached_property
    def inspection(self) -> Inspection:
        """The inspection of the compiled step."""
        return inspect_step(self.subject)

    @property
    def structure(self) -> str:
        """The hash of the compiled step, and the hash of the constants of all batch sizes."""
        return self.inspection.program_sha256 + program_digest("", self.lowered)

    @property
    def options(self) -> dict[str, OptionValue]:
        """The compiler options by name; the StableHLO does not show these options."""
        return dict(self.subject.experiment.program.options)

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each mesh axis that has more than one device."""
        shape = self.subject.experiment.layout.mesh.shape
        return {axis: size for axis, size in shape.items() if size > 1}


def judge_knob(step: AuditedStep, path: KeyPath, *, full: bool) -> KnobEffect | None:
    """Return the effect of the knob at `path`, or None for a section that is not a knob.

    Args:
      step: the train step of the complete config.
      path: the path of a setting or section.
      full: whether to judge every knob by the compiled steps.

    Raises:
      RunError: the compiled step of the complete config is too large for the device.
    """

    def found(verdict: KnobVerdict, effect: str) -> KnobEffect:
        value, origin = step.document.get(path)[1], str(step.document.origin(path))
        return KnobEffect(dotted(path), value, origin, verdict, effect)

    section = isinstance(value_at(step.document.values, path), dict)
    if reason := reason_not_in_the_step(path):
        return None if section else found("not in the step", reason)
    try:
        document = without(step.document, path)
        config = validate(document, ExperimentConfig)
        default = value_at(config.model_dump(mode="json"), path)
        if section and default is not None:
            return None
        if _explicit(config) == _explicit(step.config) or _repeats_signature(step.document, path):
            return found("default", "")
        other = _step(step, document, config, f"without {dotted(path)}")
    except ConfigError as error:
        return None if section else found("required", config_refusal(error))
    # On the given devices, the default gives the mesh of the config, except for axes of size 1.
    like = config.model_copy(update={"mesh": step.config.mesh})
    if other.mesh == step.mesh and like == step.config:
        return found("default", "")
    effect = _effect(other, step, compile_both=full or path[0] in LAYOUT)
    if effect:
        return found("ok", effect)
    if default is None and _is_read(step, path):
        return found("default", "the value that null selects")
    if path[:2] == ("sharding", "params"):
        # On a mesh that splits parameters, a config without names of dims was refused above, and
        # the knob was found to be `required`. On other meshes the names have no effect, which is
        # not a mistake.
        return found(
            "not in the step", "it names dims, which only meshes that split parameters need"
        )
    return found("NO EFFECT", "without the setting the step is the same")


def _repeats_signature(document: Document, path: KeyPath) -> bool:
    """Return whether a knob sets an argument of an imported function to its default value."""
    if len(path) != 3 or path[1] != "args":
        return False
    section, name = document.values[str(path[0])], str(path[2])
    try:
        made = load_object(section["path"])
        # A class may have a metaclass whose signature does not show the arguments, so `__init__` is
        # read.
        made = made.__init__ if isinstance(made, type) else made
        parameter = signature(made).parameters.get(name)
    except (TypeError, ValueError):  # Functions in C may have no signature.
        return False
    return parameter is not None and repr(parameter.default) == repr(section["args"][name])


def _is_read(step: AuditedStep, path: KeyPath) -> bool:
    """Return whether any of the knob's neighboring values changes the step."""
    for value in knob_neighbours(value_at(step.document.values, path)):
        document = with_value(step.document, path, value)
        try:
            config = validate(document, ExperimentConfig)
            other = _step(step, document, config, f"{dotted(path)}={value}")
        except ConfigError:
            continue
        if _effect(other, step, compile_both=path[0] in LAYOUT):
            return True
    return False


def _explicit(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config with the model's default loss, unless the config already has a loss."""
    return config.model_copy(update={"loss": config.loss or default_loss(config.model)})


def _step(
    like: AuditedStep, document: Document, config: ExperimentConfig, change: str
) -> AuditedStep:
    devices = like.subject.devices
    experiment = build(config, document, devices=devices)
    return AuditedStep(
        document, config, InspectedExperiment(f"{like.subject.name} {change}", experiment, devices)
    )


def _effect(before: AuditedStep, after: AuditedStep, *, compile_both: bool) -> str:
    """Return a description of the differences between two steps, which is empty for equal steps.

    Args:
      before: the step without the knob, or with another value.
      after: the step of the config.
      compile_both: whether to compare the compiled steps if the StableHLO differs.
    """
    if before.lowered == after.lowered and before.options == after.options:
        return "" if before.initial == after.initial else "initial state"
    if not compile_both:
        return "program"
    new = after.inspection
    try:
        old = before.inspection
    except RunError:
        return "without the setting the step does not fit into memory"
    if not difference(old, new).changes and before.structure == after.structure:
        return ""
    costs = (costs_of(one.ledger, one.step_time) for one in (old, new))
    return cost_changes(*costs) or "program"


def costs_of(found: Ledger, time: StepTime | None) -> Costs:
    """Return the costs of a compiled step on each device, with 0 for an unknown time."""
    sent = [(one, one.times_high * one.sent_bytes) for one in found.collectives]
    return {
        ("asynchronous bytes", "B"): math.fsum(n for one, n in sent if one.is_async),
        ("overlapped bytes", "B"): math.fsum(n for one, n in sent if one.overlapped),
        ("bytes", "B"): found.sent_bytes(),
        ("messages", ""): sum(one.times_high for one in found.collectives),
        ("memory", "B"): found.memory.peak_bytes,
        ("FLOPs", ""): found.flops_high,
        ("predicted time", "s"): time.seconds if time else 0.0,
    }


def cost_changes(before: Costs, after: Costs) -> str:
    """Return the changes of costs as text, in percent, or in units where the cost was 0.

    >>> flops = {("FLOPs", ""): 3}
    >>> cost_changes({("bytes", "B"): 200, **flops}, {("bytes", "B"): 100, **flops})
    'bytes -50%'
    >>> cost_changes({("bytes", "B"): 0}, {("bytes", "B"): 1500})
    'bytes +1.5 kB'
    """
    changed = [(*key, old, after[key]) for key, old in before.items() if old != after[key]]
    return ", ".join(
        f"{name} {100 * (new / old - 1):+.3g}%" if old else f"{name} +{show_number(new, unit)}"
        for name, unit, old, new in changed
    )
