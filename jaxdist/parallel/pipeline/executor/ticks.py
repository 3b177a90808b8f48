"""A lowered schedule: tables of integers with the tasks and slots of each stage in each tick.

All stages run the ticks in lock step. In a tick each stage runs at most one forward task, then at
most one backward task. Then transfers run, and the sent values can be read in the next tick. Values
that a stage needs later are stored in the slots of buffers. A slot is used again after the last
read of its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxdist.pipeline_schedules.schedule import TaskKind

Activations = Literal["recompute", "stash"]
"""The values that a backward task reads: the chunk's input, from which the task recomputes the
forward pass ("recompute"), or the residuals that the chunk's forward pass stored ("stash")."""

NONE = -1
"""The entry of a table where there is no task, or where a task uses no slot."""
KINDS = (TaskKind.FORWARD, TaskKind.FULL, TaskKind.INPUT, TaskKind.WEIGHT)
"""The kinds of tasks. The tables contain indices into this tuple."""


Entries: TypeAlias = Any
"""An int32 table `[ticks, stages]`, or in the traced program a scalar: the entry of the table for
the current tick and stage."""


class TickTasks(NamedTuple):
    """The tasks of all ticks and stages, as tables; without a task all entries are `NONE`.

    Attributes:
      kind: the index of the kind of task in `KINDS`.
      microbatch: the index of the microbatch.
      chunk: the index of the chunk in the model.
      local: the index of the chunk among the chunks of its stage.
      input: the slot of the chunk's input. With stashed residuals, the forward task of the last
        chunk overwrites this slot with the chunk's output, which the loss reads.
      gradient: the slot of the gradient of the chunk's output.
      residual: the slot of the residuals that a forward task stores for its backward task.
      kept: the slot of the values that an INPUT task stores for its WEIGHT task.
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
class Channel:
    """A transfer between stages at the end of each tick.

    Attributes:
      offset: the distance of the transfer: stage s sends to stage (s + offset) mod stages. With
        offset 0 the value stays on its stage.
      slot: the slot for the value that a stage receives, or `NONE` if the stage receives no value,
        int32 `[ticks, stages]`.
    """

    offset: int
    slot: np.ndarray

    @property
    def used(self) -> np.ndarray:
        """For each tick, whether any stage receives a value, bool `[ticks]`."""
        return (self.slot != NONE).any(axis=1)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs (sender, receiver) of all stages that receive a value in some tick."""
        receives = (self.slot != NONE).any(axis=0)
        stages = len(receives)
        return tuple(((s - self.offset) % stages, s) for s in range(stages) if receives[s])

    @property
    def rare(self) -> bool:
        """Whether fewer than half of the ticks send anything."""
        return float(self.used.mean()) < 0.5


@dataclass(frozen=True)
class Slots:
    """The number of slots of each buffer of `StageState`.

    Each number is the maximum over the stages, because all stages run the same program.
    """

    inputs: int
    gradients: int
    residuals: int
    kept: int


@dataclass(frozen=True)
class Ticks:
    """A schedule that is lowered to ticks of a single program for all stages.

    Attributes:
      name: the name of the schedule.
      microbatches: the number of microbatches of a batch.
      stages: the number of stages, which is the size of mesh axis `stage`.
      placement: the stage of each chunk.
      forward, backward: the tables of the forward and of the backward tasks.
      outputs: the channels that carry activations to the next chunk.
      cotangents: the channels that carry gradients to the previous chunk.
      slots: the number of slots of each buffer.
      activations: the values that a backward task reads; the slots are assigned for these values.
    """

    name: str
    microbatches: int
    stages: int
    placement: tuple[int, ...]
    forward: TickTasks
    backward: TickTasks
    outputs: tuple[Channel, ...]
    cotangents: tuple[Channel, ...]
    slots: Slots
    activations: Activations

    @property
    def ticks(self) -> int:
        """The number of ticks in which the tables run all tasks of a step."""
        return len(self.forward.kind)

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.placement)

    @property
    def trains(self) -> bool:
        """Whether the schedule has backward tasks."""
        return bool((self.backward.kind != NONE).any())

    @property
    def paired(self) -> bool:
        """Whether some stage has a forward and a backward task in the same tick."""
        return bool(((self.forward.kind != NONE) & (self.backward.kind != NONE)).any())

    def seconds(self, task_seconds: Mapping[TaskKind, float]) -> float:
        """Return the sum of the times of all ticks, without transfers.

        A tick takes as long as its slowest stage.

        Args:
          task_seconds: the time of each kind of task, in any unit, which is also the unit of the
            result.
        """
        seconds = np.array([*(task_seconds[kind] for kind in KINDS), 0.0])
        # `NONE` is -1, so a lookup of no task finds the zero at the end.
        return float((seconds[self.forward.kind] + seconds[self.backward.kind]).max(axis=1).sum())
