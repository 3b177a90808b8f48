"""Pipeline schedules as data: the tasks of each stage, in order.

A *stage* is a position along the `stage` axis. A *chunk* is a slice of the model's layers; chunks
are counted in the order of the forward pass. A stage holds one chunk or several. For the same
microbatch, the forward task of chunk c needs the forward task of chunk c - 1. The backward task of
chunk c needs the backward task of chunk c + 1 and the forward task of chunk c.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskKind(StrEnum):
    """The kind of a task. The values are the letters in the CSV form of a schedule.

    The backward pass of a chunk is a FULL task, or two tasks. Of these two, the INPUT task computes
    the gradient of the chunk's input, for which the previous stage waits. The later WEIGHT task
    computes the gradients of the chunk's weights.
    """

    FORWARD = "F"
    FULL = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """A task of a stage: a pass of a microbatch through a chunk.

    Attributes:
      kind: the kind of the pass.
      chunk: the index of the chunk in the model.
      microbatch: the index of the microbatch.

    >>> print(Task(TaskKind.FORWARD, chunk=3, microbatch=2))
    3F2
    """

    kind: TaskKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Slot = Task | None
"""A task, or None if the stage waits for a unit of time."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the order of the tasks on each stage.

    Attributes:
      name: the name of the schedule, such as "1f1b".
      microbatches: the number of microbatches in a step.
      placement: the stage of each chunk.
      rows: the row of each stage: its tasks, in order. A row may contain None for units of waiting,
        and is then a timeline in which each task takes a unit of time. If a row has no None,
        the stage still waits until its next task can run.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Slot, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages of the schedule."""
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """The number of chunks on all stages together."""
        return len(self.placement)

    def tasks(self, stage: int) -> tuple[Task, ...]:
        """Return the tasks of a stage, in order."""
        return tuple(task for task in self.rows[stage] if task is not None)


def loop(stages: int, chunks: int) -> tuple[int, ...]:
    """Return the looping placement: chunk c is on stage c mod stages.

    >>> loop(2, 4)
    (0, 1, 0, 1)
    """
    return tuple(chunk % stages for chunk in range(chunks))


def v_shape(stages: int) -> tuple[int, ...]:
    """Return the V-shaped placement: the first stage has the first and the last chunk.

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(stages), *reversed(range(stages)))
