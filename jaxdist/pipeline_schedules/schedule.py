"""A pipeline schedule as data: the tasks of each stage, in order.

A *stage* is a position along the `stage` axis, a *chunk* a slice of the model's layers, counted in
the order in which activations pass through them. A stage holds one chunk, or several. For the same
microbatch, the forward task of chunk c needs the forward task of chunk c - 1; the backward task of
chunk c needs the backward task of chunk c + 1, and the forward task of chunk c.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskKind(StrEnum):
    """The work of a task on its microbatch; the letters are those of the CSV form.

    A backward pass is a FULL task, or two tasks: an INPUT task computes the gradient of the chunk's
    input, which the previous stage waits for, and a later WEIGHT task that of the chunk's weights.
    """

    FORWARD = "F"
    FULL = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """A unit of work of a stage.

    >>> print(Task(TaskKind.FORWARD, chunk=3, microbatch=2))
    3F2
    """

    kind: TaskKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Slot = Task | None
"""A task, or None where the stage waits for a unit of time."""


@dataclass(frozen=True)
class Schedule:
    """The tasks of every stage.

    Attributes:
      name: name of the schedule, such as "1f1b".
      microbatches: number of microbatches in a step.
      placement: the stage of each chunk.
      rows: the tasks of each stage, in order. Waiting may be left out: a stage waits for the
        dependencies of its next task. If waiting is included, a row is a timeline in units of
        tasks.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Slot, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """The number of chunks of the model, on all stages together."""
        return len(self.placement)

    def tasks(self, stage: int) -> tuple[Task, ...]:
        """Return the tasks of a stage, in order."""
        return tuple(task for task in self.rows[stage] if task is not None)


def needs(task: Task, chunks: int) -> tuple[Task, ...]:
    """Return the dependencies of a task, apart from its stage's order.

    A backward task needs the next chunk's FULL or INPUT task, whichever the schedule has; both are
    returned.

    >>> [str(t) for t in needs(Task(TaskKind.FULL, chunk=0, microbatch=5), chunks=2)]
    ['0F5', '1B5', '1I5']
    """
    kind, chunk, microbatch = task.kind, task.chunk, task.microbatch
    if kind is TaskKind.FORWARD:
        return () if chunk == 0 else (Task(kind, chunk - 1, microbatch),)
    if kind is TaskKind.WEIGHT:
        return (Task(TaskKind.INPUT, chunk, microbatch),)
    own = Task(TaskKind.FORWARD, chunk, microbatch)
    if chunk == chunks - 1:
        return (own,)
    return (own, *(Task(k, chunk + 1, microbatch) for k in (TaskKind.FULL, TaskKind.INPUT)))


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
