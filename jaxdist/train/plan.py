"""The plan of a run: its train stages, computed from its length, batch sizes and learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.cost.context import near_lengths
from jaxdist.errors import ConfigError
from jaxdist.optim.batch_scaling import (
    BatchPhase,
    BatchRampConfig,
    PhaseConfig,
    plan_phases,
    ramp_stages,
)
from jaxdist.optim.build import Rate, plan_rate
from jaxdist.optim.common import OptimizerConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.sharding import Layout
from jaxdist.train.replicas import ReplicaCheckConfig
from jaxdist.train.rescale import Sizes, last_stage, rescaled, seen


class TrainConfig(Config):
    """The length of training, and its batch sizes."""

    steps: Count | None = None
    """The number of optimizer steps of the run; set either steps or epochs."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """The number of passes over the training split; the number of steps is rounded, and halves are
    rounded up. Set either steps or epochs."""
    batch_size: Count
    """The number of examples (windows, images) per optimizer step, over all devices and
    microbatches."""
    rescaled_from: Count | None = None
    """The batch size of the full mesh, to which the learning rate and the length refer, if an agent
    has changed batch_size (elastic.batch: rescale). null means batch_size. Agents set this value,
    and a config leaves it out."""
    microbatches: Count = 1
    """The number of parts of a batch that are computed one after another. More parts need less
    memory for activations."""
    batch_ramp: BatchRampConfig | None = None
    """The smaller batches with which the run begins. Each size is compiled separately. null always
    uses batch_size."""
    phases: Annotated[list[PhaseConfig], Field(min_length=1)] | None = None
    """The parts of the run, each with a batch size and a learning rate; evaluation uses batch_size.
    null trains all steps of the run with the same settings."""
    log_every: Count = 10
    """The number of steps between two records of metrics.jsonl. The printed lines do not depend on
    this number: if the output is not a terminal, a line is printed about every 10 seconds."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """The number of batches that wait on the devices, in addition to the batch in use."""
    check_replicas: ReplicaCheckConfig | None = None
    """The comparison of replicas of the state, which finds faulty devices; null compares nothing.
    """

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("set exactly one of steps and epochs")
        if self.batch_ramp is not None and self.phases is not None:
            raise ValueError(
                "set at most one of batch_ramp and phases, because a phase has a single batch size"
            )
        return self

    @property
    def full_batch_size(self) -> int:
        """The number of examples of a step on the full mesh."""
        return self.rescaled_from or self.batch_size

    def total_examples(self, examples: int | None) -> int:
        """Return the number of examples that a run of `epochs` trains on.

        Args:
          examples: the number of examples in the training split. It may be None only for a run
            without `epochs`.
        """
        assert self.epochs is not None
        assert examples is not None, "epochs need the size of the data"
        return max(1, nearest(self.epochs * examples))

    def microbatches_of(self, batch_size: int) -> int:
        """Return the number of microbatches for a batch of `batch_size` examples.

        No microbatch is larger than a microbatch of the config's batch_size.
        """
        return math.ceil(batch_size * self.microbatches / self.batch_size)


@dataclass(frozen=True)
class TrainPlan:
    """The train stages of a run, of which there is at least one. A stage has a single batch size.

    Attributes:
      stages: the stages, in order.
      rate: the learning rate that phases determine, or None if the optimizer's config determines
        the learning rate.
      sizes: the batch sizes so far of a run whose batch size follows the mesh, or () for other
        runs. The only stage of such a run has the last size.
      full_steps: the number of steps that the run would take with batches of the full size, or 0
        if `sizes` is empty.
    """

    stages: tuple[BatchPhase, ...]
    rate: Rate | None = None
    sizes: Sizes = ()
    full_steps: int = 0

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps in the run."""
        return self.stages[-1].first_step + self.stages[-1].steps

    @property
    def first_examples(self) -> tuple[int, ...]:
        """The number of examples that were trained on before each stage."""
        before = seen(self.sizes, self.sizes[-1][0]) if self.sizes else 0
        sizes = [stage.steps * stage.batch_size for stage in self.stages]
        return tuple(before + sum(sizes[:i]) for i in range(len(sizes)))


def nearest(number: float) -> int:
    """Return the nearest whole number; halves are rounded up, unlike in Python's `round`.

    >>> [nearest(number) for number in (0.5, 1.5, 2.5, 2.4)]
    [1, 2, 3, 2]
    """
    return math.floor(number + 0.5)


def needs_examples(train: TrainConfig, optim: OptimizerConfig) -> bool:
    """Return whether the plan of a run depends on the size of the training split."""
    scaled = optim.scale_from
    return train.epochs is not None or (scaled is not None and scaled.warmup_epochs is not None)


def plan_stages(train: TrainConfig, examples: int | None, sizes: Sizes = ()) -> TrainPlan:
    """Plan the stages of a run.

    Args:
      examples: the size of the training split, which may be None if `needs_examples` is false.
      sizes: for a resumed run whose batch size follows the mesh, all batch sizes so far, with the
        present size last; () for other runs.

    Raises:
      ConfigError: a ramp does not end at batch_size or is longer than the run; the fractions of
        phases do not sum to 1.
    """
    if train.phases is not None:
        per_example = math.fsum(p.examples_fraction / p.batch_size for p in train.phases)
        total = round(train.steps / per_example) if train.steps else train.total_examples(examples)
        plan = plan_phases(train.phases, total_examples=total)
        return TrainPlan(plan.stages, Rate(plan.schedule, plan.explained))
    if train.batch_ramp is not None:
        return TrainPlan(_plan_ramp(train, train.batch_ramp, examples))
    steps = train.steps
    if steps is None:
        assert train.epochs is not None
        assert examples is not None, "epochs need the size of the data"
        steps = max(1, nearest(train.epochs * examples / train.full_batch_size))
    if not sizes and train.rescaled_from is None:
        return TrainPlan((BatchPhase(0, steps, train.batch_size),))
    sizes = sizes or ((0, train.batch_size),)
    stage = last_stage(sizes, steps * train.full_batch_size)
    return TrainPlan((stage,), sizes=sizes, full_steps=steps)


def _plan_ramp(
    train: TrainConfig, ramp: BatchRampConfig, examples: int | None
) -> tuple[BatchPhase, ...]:
    if train.steps is None:
        total = train.total_examples(examples)
        return ramp_stages(ramp, batch_size=train.batch_size, total_examples=total)
    # The ramp is planned for more examples than needed, and the last stage is then cut to the
    # number of steps.
    ample = ramp.ramp_examples + train.steps * train.batch_size
    *rising, last = ramp_stages(ramp, batch_size=train.batch_size, total_examples=ample)
    if train.steps <= last.first_step:
        raise ConfigError(
            f"batch ramp: {last.first_step} steps pass until ramp_examples {ramp.ramp_examples} "
            f"are seen, but the run has {train.steps}; shorten the ramp"
        )
    return (*rising, replace(last, steps=train.steps - last.first_step))


def plan_learning_rate(
    train: TrainConfig, optim: OptimizerConfig, plan: TrainPlan, examples: int | None
) -> Rate:
    """Derive the learning rate of a run with the stages of a plan.

    Args:
      examples: the number of examples in the training split, or None if the plan does not depend on
        it (`needs_examples`).

    Raises:
      ConfigError: `plan_rate` raises this error; the optimizer's config has a learning rate that
        phases would override; the warm-up is in epochs, but the batch size grows.
    """
    if plan.rate is not None:
        own = None if optim.schedule == ScheduleConfig() else optim.schedule
        given = {"learning_rate": optim.learning_rate, "scale_from": optim.scale_from}
        idle = [name for name, value in {**given, "schedule": own}.items() if value is not None]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} has no effect, since train.phases set the learning rate: "
                "remove it, or train.phases"
            )
        return plan.rate
    scaled = optim.scale_from
    if train.batch_ramp is not None and scaled is not None and scaled.warmup_epochs is not None:
        raise ConfigError(
            f"optim.scale_from.warmup_epochs {scaled.warmup_epochs:g} is not a fixed number of "
            "steps if train.batch_ramp changes the batch size; set "
            "optim.scale_from.warmup_fraction, or optim.schedule.warmup_steps"
        )
    rate = plan_rate(
        optim,
        total_steps=plan.full_steps or plan.total_steps,
        batch_size=train.full_batch_size,
        examples_per_epoch=examples,
    )
    if not plan.sizes:
        return rate
    return rescaled(rate, scaled, train.full_batch_size, plan.sizes)


def explain_plan(plan: TrainPlan, rate: Rate) -> tuple[str, ...]:
    """Return a line for each value that is derived from other settings.

    The result is () if the config sets all values directly.
    """
    if len(plan.stages) == 1 or plan.rate is not None:
        return rate.explained
    return (*(stage.description for stage in plan.stages), *rate.explained)


def check_stages(
    train: TrainConfig, plan: TrainPlan, layout: Layout, shards: int | None = None
) -> None:
    """Check that the batch of each train stage divides over devices and microbatches.

    Args:
      shards: the number of logical shards, which split the batch instead of the devices, or None
        without logical shards.

    Raises:
      ConfigError: a batch does not divide; the message names the stage, and the ramp or phase.
    """
    if train.batch_ramp is None and train.phases is None:
        return
    ramp = train.batch_ramp
    # A pipeline's schedule is for a fixed number of microbatches, even if the batch size changes.
    staged = layout.mesh.shape.get("stage", 1) > 1
    problems = []
    for index, stage in enumerate(plan.stages):
        try:
            own = train.microbatches_of(stage.batch_size)
            microbatches = train.microbatches if staged else own
            check_batch(stage.batch_size, microbatches, layout, shards)
        except ConfigError as error:
            begun = f"train.phases.{index}" if ramp is None else "train.batch_ramp"
            steps = f"steps {stage.first_step + 1} to {stage.first_step + stage.steps}"
            problems.append(f"{begun}, {steps}: {error}")
    if problems and ramp is not None:
        problems.append(
            f"the ramp goes from start_batch_size {ramp.start_batch_size} to train.batch_size "
            f"{train.batch_size} by increment {ramp.increment}: each batch size of the ramp must "
            "divide over the devices and microbatches"
        )
    if problems:
        setting = "phases" if ramp is None else "batch_ramp"
        raise ConfigError("\n".join(problems), setting=(setting,))


def check_batch(
    batch_size: int, microbatches: int, layout: Layout, shards: int | None = None
) -> None:
    """Check that the batch divides over microbatches and over the devices that split it.

    Args:
      shards: the number of logical shards, which split the batch instead of the devices, or None
        without logical shards.

    Raises:
      ConfigError: the batch does not divide; the message gives the nearest sizes that divide.
    """
    parts = (shards or layout.data_size) * microbatches
    if batch_size % parts:
        along = " x ".join(layout.names_of("batch")) or "data"
        over = f"{shards} logical shards" if shards else f"{layout.data_size} devices along {along}"
        raise ConfigError(
            f"a batch of {batch_size} does not divide over {over} x {microbatches} microbatches = "
            f"{parts} parts; use {near_lengths(batch_size, parts)}"
        )
