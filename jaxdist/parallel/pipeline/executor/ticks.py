"""A schedule in lock step, as tables of integers: each stage's tasks and slots in each tick.

In a tick each stage runs at most one forward task, then at most one backward task. Then transfers
run, and the values sent can be read from the next tick on. Values that a stage needs later wait in
the slots of buffers. A slot is used again after the last read of its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxdist.pipeline_schedules.schedule import TaskKind

Activations = Literal["recompute", "stash"]
"""The input of the backward pass: a chunk's input (recompute), or the residuals that the chunk's
forward pass stored (stash)."""

NONE = -1
"""The entry of a table for no task or no slot."""
KINDS = (TaskKind.FORWARD, TaskKind.FULL, TaskKind.INPUT, TaskKind.WEIGHT)
"""The kinds of tasks; tables contain indices into this tuple."""


Entries: TypeAlias = Any
"""An int32 table `[ticks, stages]`; inside the traced program, the entry for a tick and stage."""


class TickTasks(NamedTuple):
    """The task of each tick and stage; all entries are `NONE` where there is no task.

    Attributes:
      kind: index into `KINDS`.
      microbatch: index of the microbatch.
      chunk: index of the chunk in the model.
      local: index of the chunk among the chunks of its stage.
      input: slot of the chunk's input. With stashed residuals, the slot then has the output of the
        last chunk, for the loss, since the input is no longer needed.
      gradient: slot of the gradient of the chunk's output.
      residual: slot of the residuals that a forward task stores for its backward task.
      kept: slot of the values that an INPUT task stores for its WEIGHT task.
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
    """A transfer between stages at the end of each tick, in which every stage takes part.

    Attributes:
      offset: distance of the transfer: stage s sends to stage (s + offset) mod stages. With 0 the
        value stays on its stage.
      slot: int32 `[ticks, stages]`: the slot of the value that a stage receives, or NONE.
    """

    offset: int
    slot: np.ndarray

    @property
    def used(self) -> np.ndarray:
        """Whether anything is sent in each tick, a bool `[ticks]`."""
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
    """The number of slots of each buffer: the maximum over stages, which all run one program."""

    inputs: int
    gradients: int
    residuals: int
    kept: int


@dataclass(frozen=True)
class Ticks:
    """A schedule in the form of an SPMD program.

    Attributes:
      placement: the stage of each chunk.
      forward, backward: tables of the forward and of the backward tasks.
      outputs: channels that carry activations to the next chunk.
      cotangents: channels that carry gradients to the previous chunk.
      activations: the policy for the input of the backward pass, which determined the slots.
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
        """The number of ticks."""
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
        """Add up the times of all ticks, each as long as its busiest stage, without transfers."""
        seconds = np.array([*(task_seconds[kind] for kind in KINDS), 0.0])
        # `NONE` is -1, so a lookup of no task finds the zero at the end.
        return float((seconds[self.forward.kind] + seconds[self.backward.kind]).max(axis=1).sum())
