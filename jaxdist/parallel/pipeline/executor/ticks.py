"""A schedule in lock step, as tables of integers: each stage's tasks and slots in each tick.

In a tick each stage runs at most one forward task, then at most one backward task; then transfers
run, and the values sent can be read from the next tick on. Values that a stage needs later wait in
buffers. The tables contain their slots; another value takes over a slot after its last read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxdist.pipeline_schedules.schedule import TaskKind

Activations = Literal["recompute", "stash"]
"""Input of the backward pass: a chunk's input, or all that its forward pass left."""

NONE = -1
"""No task, or no slot."""
KINDS = (TaskKind.FORWARD, TaskKind.FULL, TaskKind.INPUT, TaskKind.WEIGHT)
"""The kinds of tasks; tables hold their indices here."""


Entries: TypeAlias = Any
"""An int32 table `[ticks, stages]`; inside the traced program its entry for a tick and stage."""


class TickTasks(NamedTuple):
    """A task per tick and stage; `NONE` where there is none.

    Attributes:
      kind: index into `KINDS`.
      microbatch: index of the microbatch.
      chunk: index of the chunk in the model.
      local: its index among the chunks of its stage.
      input: slot of the chunk's input. With stashed residuals the last chunk's output is there, for
        the loss, since its input is no longer needed.
      gradient: slot of the gradient of the chunk's output.
      residual: slot of the residuals from a forward task to its backward task.
      kept: slot of the values from an INPUT task to its WEIGHT task.
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
    """A transfer that every stage takes part in, at the end of each tick.

    Attributes:
      offset: stage s sends to stage (s + offset) mod stages; with 0 the value stays on its stage.
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
        """The pairs (sender, receiver) of all stages that ever receive."""
        receives = (self.slot != NONE).any(axis=0)
        stages = len(receives)
        return tuple(((s - self.offset) % stages, s) for s in range(stages) if receives[s])

    @property
    def rare(self) -> bool:
        """Whether fewer than half of the ticks send anything."""
        return float(self.used.mean()) < 0.5


@dataclass(frozen=True)
class Slots:
    """The number of slots of each buffer: the maximum over stages, as all run one program."""

    inputs: int
    gradients: int
    residuals: int
    kept: int


@dataclass(frozen=True)
class Ticks:
    """A schedule in the form of an SPMD program.

    Attributes:
      placement: the stage of each chunk.
      forward, backward: the tasks.
      outputs: channels that carry activations to the next chunk.
      cotangents: channels that carry gradients to the previous chunk.
      activations: the policy that the slots were laid out for.
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
        """Whether there are backward tasks."""
        return bool((self.backward.kind != NONE).any())

    @property
    def paired(self) -> bool:
        """Whether some stage has a forward and a backward task in the same tick."""
        return bool(((self.forward.kind != NONE) & (self.backward.kind != NONE)).any())

    def seconds(self, task_seconds: Mapping[TaskKind, float]) -> float:
        """Add up the time of all ticks, each as long as its busiest stage, without transfers."""
        seconds = np.array([*(task_seconds[kind] for kind in KINDS), 0.0])
        # The index for no task is -1: the zero at the end.
        return float((seconds[self.forward.kind] + seconds[self.backward.kind]).max(axis=1).sum())
