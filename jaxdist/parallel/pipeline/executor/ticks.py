"""A schedule in lock step, as tables of integers: what each stage does in each tick, and with what.

A tick is a forward task of each stage (or none), then a backward task (or none), then transfers.
What is sent in one tick is there in the next. Where a stage keeps what it needs later is settled
beforehand: every value has a slot of a buffer, which another takes over once it is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.schedules.schedule import Kind

Activations = Literal["recompute", "stash"]
"""What the backward pass starts from: a chunk's input, or all that its forward pass leaves."""

NONE = -1
"""No task, or no slot."""
KINDS = (Kind.FORWARD, Kind.FULL, Kind.INPUT, Kind.WEIGHT)
"""A kind of task is written down as its index here."""


Entries = Any
"""An int32 table `[ticks, stages]`, or what a traced program has taken out of one."""


class Work(NamedTuple):
    """One task per tick and stage; `NONE` where there is none.

    Attributes:
      kind: index into `KINDS`.
      chunk: of the model; `local` is its index among those of its stage.
      input: slot of the chunk's input, or of its output where the loss is taken of that.
      gradient: slot of the gradient of the chunk's output.
      residual: slot of what a forward pass leaves to its backward pass.
      kept: slot of what the INPUT half leaves to the WEIGHT half.
    """

    kind: Entries
    microbatch: Entries
    chunk: Entries
    local: Entries
    input: Entries
    gradient: Entries
    residual: Entries
    kept: Entries


@dataclass(frozen=True)
class Lane:
    """A transfer from every stage to the one `offset` places further round; 0 stays on the stage.

    Attributes:
      slot: int32 `[ticks, stages]`, where a stage puts what arrives at the end of a tick, or NONE.
    """

    offset: int
    slot: np.ndarray

    @property
    def used(self) -> np.ndarray:
        """Bool `[ticks]`: whether anything is sent."""
        return (self.slot != NONE).any(axis=1)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of all stages that ever receive."""
        receives = (self.slot != NONE).any(axis=0)
        stages = len(receives)
        return tuple(((s - self.offset) % stages, s) for s in range(stages) if receives[s])

    @property
    def rare(self) -> bool:
        """Whether something is sent in fewer than half of the ticks."""
        return float(self.used.mean()) < 0.5


@dataclass(frozen=True)
class Slots:
    """How many values of each sort a stage must be able to hold, at most over the stages."""

    inputs: int
    gradients: int
    residuals: int
    kept: int


@dataclass(frozen=True)
class Ticks:
    """A schedule that an SPMD program can run.

    Attributes:
      placement: the stage of each chunk.
      forward, backward: the tasks.
      outputs: lanes of activations; `cotangents` those of gradients.
      activations: the policy that the slots were laid out for.
    """

    name: str
    microbatches: int
    stages: int
    placement: tuple[int, ...]
    forward: Work
    backward: Work
    outputs: tuple[Lane, ...]
    cotangents: tuple[Lane, ...]
    slots: Slots
    activations: Activations

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.forward.kind)

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.placement)

    @property
    def chunks_per_stage(self) -> int:
        """Chunks of the stage that has most."""
        return max(self.placement.count(stage) for stage in range(self.stages))

    @property
    def trains(self) -> bool:
        """Whether there are backward tasks."""
        return bool((self.backward.kind != NONE).any())

    @property
    def paired(self) -> bool:
        """Whether some stage has a forward and a backward task in one tick."""
        return bool(((self.forward.kind != NONE) & (self.backward.kind != NONE)).any())

    def seconds(self, task_seconds: Mapping[Kind, float]) -> float:
        """Time of all ticks, each as long as its busiest stage; transfers take none."""
        seconds = np.array([*(task_seconds[kind] for kind in KINDS), 0.0])
        # The index of no task is -1: the zero at the end.
        return float((seconds[self.forward.kind] + seconds[self.backward.kind]).max(axis=1).sum())
