"""Rows of tasks: how to write that of a stage, and to visit all tasks in an order that can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind

Dependency = tuple[bool, int, int]
"""What a task may wait for: (whether it is a backward task, chunk, microbatch).

FULL and INPUT tasks are one and the same here: both send the gradient of the chunk's input.
"""


def key(task: Task) -> Dependency:
    """What others wait for when they wait for this FORWARD, FULL or INPUT task."""
    return task.kind is not TaskKind.FORWARD, task.chunk, task.microbatch


def needed(task: Task, chunks: int) -> list[Dependency]:
    """What must be done before a task: `schedule.needs` as dependencies."""
    kind, chunk, microbatch = task.kind, task.chunk, task.microbatch
    if kind is TaskKind.FORWARD:
        return [(False, chunk - 1, microbatch)] if chunk else []
    if kind is TaskKind.WEIGHT:
        return [(True, chunk, microbatch)]
    own = (False, chunk, microbatch)
    return [own] if chunk == chunks - 1 else [own, (True, chunk + 1, microbatch)]


class Walk:
    """One pass over a schedule: each stage does its tasks in order, as soon as it may.

    Iterating gives (stage, task), every task after all it needs. It ends when all tasks are done,
    or when no stage can go on: `blocked` then holds the place in its row and the missing key of
    each stage that waits.

    >>> rows = ((Task(TaskKind.FORWARD, 0, 0),), (Task(TaskKind.FORWARD, 1, 0),))
    >>> walk = Walk(Schedule("two", microbatches=1, placement=(0, 1), rows=rows))
    >>> [(stage, str(task)) for stage, task in walk], walk.blocked
    ([(0, '0F0'), (1, '1F0')], {})
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.blocked: dict[int, tuple[int, Dependency]] = {}

    def __iter__(self) -> Iterator[tuple[int, Task]]:
        rows, chunks = self.schedule.rows, self.schedule.chunks
        place = [0] * len(rows)
        done: set[Dependency] = set()
        waiting: dict[Dependency, list[int]] = {}
        ready = list(reversed(range(len(rows))))
        while ready:
            stage = ready.pop()
            self.blocked.pop(stage, None)
            row = rows[stage]
            while place[stage] < len(row):
                task = row[place[stage]]
                if task is not None:
                    missing = _missing(task, chunks, done)
                    if missing is not None:
                        waiting.setdefault(missing, []).append(stage)
                        self.blocked[stage] = (place[stage], missing)
                        break
                    yield stage, task
                    if task.kind is not TaskKind.WEIGHT:
                        done.add(key(task))
                        ready.extend(waiting.pop(key(task), ()))
                place[stage] += 1


def _missing(task: Task, chunks: int, done: set[Dependency]) -> Dependency | None:
    for need in needed(task, chunks):
        if need not in done:
            return need
    return None


def places(row: tuple[Slot, ...]) -> dict[Task, int]:
    """Where each task of a row stands, counted from 0; the first place of one that stands twice."""
    found: dict[Task, int] = {}
    for place, task in enumerate(row):
        if task is not None:
            found.setdefault(task, place)
    return found


class RowWriter:
    """Writes the tasks of a stage; counts the microbatches of each kind and chunk by itself.

    >>> row = RowWriter()
    >>> row.add((TaskKind.FORWARD, 2), times=2)
    >>> row.add((TaskKind.FORWARD, 2), (TaskKind.FULL, 2))
    >>> [str(task) for task in row.tasks]
    ['2F0', '2F1', '2F2', '2B0']
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.count: Counter[tuple[TaskKind, int]] = Counter()

    def add(self, *pattern: tuple[TaskKind, int], times: int = 1) -> None:
        """The next microbatch of each (kind, chunk), one after another; all that `times` times."""
        for _ in range(times):
            for kind, chunk in pattern:
                self.tasks.append(Task(kind, chunk, self.count[kind, chunk]))
                self.count[kind, chunk] += 1


def refuse_small(name: str, stages: int, microbatches: int) -> None:
    """Raises ConfigError unless there is at least one stage and one microbatch."""
    if stages < 1 or microbatches < 1:
        raise ConfigError(
            f"schedule {name}: {stages} stages and {microbatches} microbatches: give at least one "
            "of each"
        )


def refuse_fewer(name: str, stages: int, microbatches: int, least: int, instead: str) -> None:
    """Raises ConfigError where a schedule has too few microbatches for its stages."""
    refuse_small(name, stages, microbatches)
    if microbatches < least:
        raise ConfigError(
            f"schedule {name}: {stages} stages need at least {least} microbatches, got "
            f"{microbatches}: use {least} or more, or fewer stages, or {instead}"
        )
