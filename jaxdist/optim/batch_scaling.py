"""The scaling of learning rate and warm-up to another batch size, batch-size ramps, and phases.

All functions in this module compute with plain numbers, and return each derived value together with
its explanation. "Batch size" always means the effective batch size: examples per optimizer step,
over all devices, microbatches and accumulated steps.

Sources: Goyal et al., arXiv 1706.02677 (linear); Krizhevsky, arXiv 1404.5997 (square root); You et
al., arXiv 1904.00962 (square root with linear-epoch warm-up; mixed batch with re-warm-up). The
rules give a starting point and do not replace a search: Nado et al., arXiv 2102.06356, find that
tuned Nesterov and Adam match LARS and LAMB at their batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

import optax
from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError
from jaxdist.optim.schedules import ScheduleConfig, build_schedule

RULES = {"linear": (1.0, 0.0), "sqrt": (0.5, 0.0), "lamb": (0.5, 1.0)}
"""The two exponents of each rule that scales settings to another batch size.

The learning rate is multiplied by the growth of the batch size to the power of the first exponent,
and the epochs of warm-up by the growth to the power of the second exponent."""


class ScaleFromConfig(Config):
    """A learning rate and warm-up that work at one batch size, and the rule that scales them."""

    batch_size: Count
    """The batch size at which the learning rate and the warm-up of this section work, in examples
    per optimizer step over all devices and microbatches."""
    learning_rate: PositiveFloat
    """The peak learning rate that works at scale_from.batch_size."""
    rule: Literal["linear", "sqrt", "lamb"] = "lamb"
    """The rule of scaling. linear and sqrt scale the learning rate with the batch size or its
    square root, and keep the epochs of warm-up. lamb scales the learning rate as sqrt does, and
    scales the epochs of warm-up with the batch size."""
    warmup_epochs: PositiveFloat | None = None
    """The number of epochs of warm-up at scale_from.batch_size; null if warmup_fraction sets the
    warm-up."""
    warmup_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The warm-up as a fraction of the run, for data without epochs; null if warmup_epochs sets the
    warm-up."""

    @property
    def warmup(self) -> str:
        """The warm-up as the config gives it, as text, or "" if the config gives no warm-up."""
        if self.warmup_fraction is not None:
            return f"optim.scale_from.warmup_fraction {self.warmup_fraction:g}"
        if self.warmup_epochs is not None:
            return f"optim.scale_from.warmup_epochs {self.warmup_epochs:g}"
        return ""

    @model_validator(mode="after")
    def _one_warmup(self) -> ScaleFromConfig:
        if self.warmup_epochs is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"set at most one of warmup_epochs ({self.warmup_epochs}) and warmup_fraction "
                f"({self.warmup_fraction})"
            )
        return self


@dataclass(frozen=True)
class Derived:
    """A derived value, and a line of text that explains the derivation."""

    value: float
    why: str


@dataclass(frozen=True)
class ScaledRates:
    """The learning rate and warm-up that a `ScaleFromConfig` gives at a batch size."""

    learning_rate: Derived
    warmup_steps: Derived


def scale(
    config: ScaleFromConfig,
    *,
    batch_size: int,
    total_steps: int,
    examples_per_epoch: int | None = None,
) -> ScaledRates:
    """Scale the learning rate and warm-up to a run of `total_steps` at the given `batch_size`.

    With growth k = batch_size / config.batch_size, the learning rate is multiplied by k (linear) or
    sqrt(k) (sqrt, lamb). With linear and sqrt, the warm-up takes the same fraction of the run. With
    lamb, the warm-up takes k times that fraction. If the number of epochs of a run is fixed, lamb's
    warm-up therefore has the same number of steps at every batch size.

    Args:
      examples_per_epoch: the size of the training split. None is allowed if the config has no
        warmup_epochs.

    Raises:
      ConfigError: the warm-up would fill the run; the config has warmup_epochs, but
        examples_per_epoch is None; a batch size or the number of steps is under 1.

    >>> bert = ScaleFromConfig(batch_size=512, learning_rate=6.25e-4, warmup_fraction=1 / 320)
    >>> found = scale(bert, batch_size=32768, total_steps=15625)
    >>> print(found.learning_rate.why)
    0.005 = 0.000625 x sqrt(32768 / 512), rule lamb
    >>> print(found.warmup_steps.why)
    3125 of 15625 steps (20%) = 0.3125% of the run at batch 512 x 32768 / 512, rule lamb
    """
    _at_least_one("scale_from", {"batch_size": batch_size, "total_steps": total_steps})
    growth = batch_size / config.batch_size
    rate_power, warmup_power = RULES[config.rule]
    ratio = f"{batch_size} / {config.batch_size}"
    rate = config.learning_rate * growth**rate_power
    factor = ratio if rate_power == 1 else f"sqrt({ratio})"
    why = f"{rate:.6g} = {config.learning_rate:.6g} x {factor}, rule {config.rule}"
    fraction, source = _reference_warmup(config, batch_size, total_steps, examples_per_epoch)
    steps = round(fraction * growth**warmup_power * total_steps)
    if steps and warmup_power:
        source += f" x {ratio}"
    warmup = f"{steps} of {total_steps} steps ({100 * steps / total_steps:.4g}%) = {source}"
    if steps >= total_steps:
        raise ConfigError(
            f"scale_from: the warm-up would fill the whole run: {warmup}, rule {config.rule}; "
            f"shorten the warm-up at batch {config.batch_size}, train longer, or use a smaller "
            f"batch than {batch_size}"
        )
    return ScaledRates(Derived(rate, why), Derived(steps, f"{warmup}, rule {config.rule}"))


def _reference_warmup(
    config: ScaleFromConfig, batch_size: int, total_steps: int, examples_per_epoch: int | None
) -> tuple[float, str]:
    """Return the unscaled warm-up as a fraction of the run, and a description of this warm-up."""
    if config.warmup_fraction is not None:
        percent = f"{100 * config.warmup_fraction:.4g}%"
        return config.warmup_fraction, f"{percent} of the run at batch {config.batch_size}"
    if config.warmup_epochs is None:
        return 0.0, "no warm-up given"
    if examples_per_epoch is None:
        raise ConfigError(
            f"scale_from: warmup_epochs {config.warmup_epochs} needs a data set of known size; set "
            "warmup_fraction instead"
        )
    _at_least_one("scale_from", {"examples_per_epoch": examples_per_epoch})
    epochs = total_steps * batch_size / examples_per_epoch
    words = f"{config.warmup_epochs:.6g} of {epochs:.4g} epochs at batch {config.batch_size}"
    return config.warmup_epochs / epochs, words


def _at_least_one(where: str, given: dict[str, int]) -> None:
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{where}: {name} {value} must be at least 1")


@dataclass(frozen=True)
class BatchPhase:
    """The part of a run at one batch size: steps `first_step + 1` to `first_step + steps`.

    Steps are counted from 1. `first_step` is the number of steps before the phase.
    """

    first_step: int
    steps: int
    batch_size: int

    @property
    def description(self) -> str:
        """The first step, the last step and the batch size, as text."""
        first, last = self.first_step + 1, self.first_step + self.steps
        return f"steps {first} to {last}: batch {self.batch_size}"


class BatchRampConfig(Config):
    """A batch size that grows by equal increments, each after the same number of examples."""

    start_batch_size: Count
    """The number of examples per optimizer step at the start."""
    increment: Count
    """The number of examples that each stage adds to the batch. The growth must be a whole number
    of increments."""
    ramp_examples: Count
    """The number of examples that are trained on before the full batch size is reached."""


def ramp_stages(
    config: BatchRampConfig, *, batch_size: int, total_examples: int
) -> tuple[BatchPhase, ...]:
    """Plan the stages of a run whose batch size grows to `batch_size`.

    A stage ends with the first step that completes its share of the examples; the run ends with the
    first step that completes all examples (Brown et al., arXiv 2005.14165; Megatron's
    `rampup-batch-size`).

    Raises:
      ConfigError: the growth is not a whole number of increments; the ramp is not shorter than the
        run.

    >>> ramp = BatchRampConfig(start_batch_size=2, increment=2, ramp_examples=8)
    >>> for stage in ramp_stages(ramp, batch_size=6, total_examples=20):
    ...     print(stage)
    BatchPhase(first_step=0, steps=2, batch_size=2)
    BatchPhase(first_step=2, steps=1, batch_size=4)
    BatchPhase(first_step=3, steps=2, batch_size=6)
    """
    start, growth = config.start_batch_size, batch_size - config.start_batch_size
    if growth <= 0 or growth % config.increment:
        raise ConfigError(
            f"batch ramp: the distance from {start} to {batch_size} is not a positive multiple of "
            f"increment {config.increment}: change one of these three numbers"
        )
    if config.ramp_examples >= total_examples:
        raise ConfigError(
            f"batch ramp: ramp_examples {config.ramp_examples} exceed the run's {total_examples} "
            "examples; shorten the ramp"
        )
    count = growth // config.increment
    ends = [config.ramp_examples * (i + 1) // count for i in range(count)]
    stages: list[BatchPhase] = []
    step = seen = 0
    # The last step of a stage takes a whole batch, so the stage may end after its planned end. The
    # next stage then begins later, and is skipped if its own planned end has passed.
    for i, end in enumerate([*ends, total_examples]):
        size = start + i * config.increment
        steps = max(0, math.ceil((end - seen) / size))
        if steps:
            stages.append(BatchPhase(step, steps, size))
        step, seen = step + steps, seen + steps * size
    return tuple(stages)


class PhaseConfig(Config):
    """A part of a run with a batch size, a learning rate and a warm-up."""

    examples_fraction: Annotated[float, Field(gt=0, le=1)]
    """The fraction of the run's examples that the phase trains on."""
    batch_size: Count
    """The number of examples per optimizer step, over all devices and microbatches."""
    learning_rate: PositiveFloat
    """The peak learning rate of the phase."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of the phase's steps in which the learning rate rises from zero."""
    end_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate at the end of the linear decay, as a fraction of the peak."""


@dataclass(frozen=True)
class PhasePlan:
    """The stages of a run in phases, and the learning rate as a function of the run's step."""

    stages: tuple[BatchPhase, ...]
    schedule: optax.Schedule
    explained: tuple[str, ...]


def plan_phases(phases: Sequence[PhaseConfig], *, total_examples: int) -> PhasePlan:
    """Plan consecutive phases, each with a warm-up from zero and a linear decay.

    The mixed-batch recipe of "BERT in 76 minutes" has two phases. The first phase has 9/10 of the
    examples, as short sequences, at batch size 65536. The second phase has 1/10 of the examples, as
    long sequences, at batch size 32768, and begins with a second warm-up.

    Raises:
      ConfigError: there are no phases; the fractions do not sum to 1; a phase has no step.
    """
    total = math.fsum(phase.examples_fraction for phase in phases)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        fractions = ", ".join(f"{phase.examples_fraction:g}" for phase in phases)
        raise ConfigError(
            f"phases: the fractions ({fractions}) sum to {total:g}, not to 1: change the fractions"
        )
    counts = [round(p.examples_fraction * total_examples / p.batch_size) for p in phases]
    for number, (phase, steps) in enumerate(zip(phases, counts, strict=True), start=1):
        if steps < 1:
            raise ConfigError(
                f"phases: phase {number} has {phase.examples_fraction:g} of {total_examples} "
                f"examples, less than one batch of {phase.batch_size}: make the phase longer, or "
                "its batch smaller"
            )
    ends = list(accumulate(counts))
    stages = tuple(
        BatchPhase(end - steps, steps, phase.batch_size)
        for phase, steps, end in zip(phases, counts, ends, strict=True)
    )
    warmups = [round(p.warmup_fraction * steps) for p, steps in zip(phases, counts, strict=True)]
    rates = [
        build_schedule(
            ScheduleConfig(type="linear", warmup_steps=warmup, end_fraction=p.end_fraction),
            peak=p.learning_rate,
            total_steps=steps,
        )
        for p, warmup, steps in zip(phases, warmups, counts, strict=True)
    ]
    explained = tuple(
        f"{s.description}, learning rate from 0 to {p.learning_rate:.6g} in {warmup} steps, then "
        f"to {p.learning_rate * p.end_fraction:.6g}"
        for p, s, warmup in zip(phases, stages, warmups, strict=True)
    )
    return PhasePlan(stages, optax.join_schedules(rates, ends[:-1]), explained)
