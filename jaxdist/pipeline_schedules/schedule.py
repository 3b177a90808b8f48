"""A pipeline schedule as data: which tasks each stage runs, in which order.

A *stage* is one position along the `stage` axis, a *chunk* one slice of the model's layers, counted
in the order in which activations pass through them. A stage holds one chunk, or several. Forward of
chunk c needs forward of chunk c - 1 of the same microbatch; backward of chunk c needs backward of
chunk c + 1, and its own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskKind(StrEnum):
    """What a task does with its microbatch; the letters are those of the CSV form.

    A backward pass is one FULL task, or two: the gradient of the chunk's input first, which the
    stage before waits for, and that of its weights at any time after.
    """

    FORWARD = "F"
    FULL = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One piece of work of one stage.

    >>> print(Task(TaskKind.FORWARD, chunk=3, microbatch=2))
    3F2
    """

    kind: TaskKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Slot = Task | None
"""A task, or None: the stage waits for one unit of time."""


@dataclass(frozen=True)
class Schedule:
    """What every stage does.

    Attributes:
      name: of the schedule, such as "1f1b".
      microbatches: how many go through the pipeline in one step.
      placement: the stage that holds each chunk, by chunk.
      rows: by stage, its tasks in order. Waiting need not be written down: a stage waits for what
        its next task needs. Where it is, a row is a stage's time line in units of one task each.
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
        """The number of chunks of the model, all stages together."""
        return len(self.placement)

    def tasks(self, stage: int) -> tuple[Task, ...]:
        """The tasks of a stage, in order."""
        return tuple(task for task in self.rows[stage] if task is not None)


def needs(task: Task, chunks: int) -> tuple[Task, ...]:
    """What must be done before a task, its stage's order aside.

    A backward task may need the next chunk's FULL or its INPUT task: whichever the schedule has.

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
    """The looping placement: chunk c lies on stage c mod stages.

    >>> loop(2, 4)
    (0, 1, 0, 1)
    """
    return tuple(chunk % stages for chunk in range(chunks))


def v_shape(stages: int) -> tuple[int, ...]:
    """The V-shaped placement, there and back: the first stage has the first and the last chunk.

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(stages), *reversed(range(stages)))
