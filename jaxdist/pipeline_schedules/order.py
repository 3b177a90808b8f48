"""Rows of tasks: writing a stage's row, and visiting all tasks in an order that can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind

Dependency = tuple[bool, int, int]
"""The result that a task may wait for: (whether it is a backward task's, chunk, microbatch).

FULL and INPUT tasks are equivalent here: both send the gradient of the chunk's input.
"""


def key(task: Task) -> Dependency:
    """Return the dependency that this FORWARD, FULL or INPUT task fulfils."""
    return task.kind is not TaskKind.FORWARD, task.chunk, task.microbatch


def needed(task: Task, chunks: int) -> list[Dependency]:
    """Return the results that a task needs; `schedule.needs` returns the tasks that make them."""
    kind, chunk, microbatch = task.kind, task.chunk, task.microbatch
    if kind is TaskKind.FORWARD:
        return [(False, chunk - 1, microbatch)] if chunk else []
    if kind is TaskKind.WEIGHT:
        return [(True, chunk, microbatch)]
    own = (False, chunk, microbatch)
    return [own] if chunk == chunks - 1 else [own, (True, chunk + 1, microbatch)]


class Walk:
    """A pass over a schedule, in which each stage runs its tasks in order, as early as possible.

    Iterating yields (stage, task), every task after its dependencies. It ends when all tasks are
    done, or when no stage can continue: `blocked` then has the place in its row and the missing
    dependency of each waiting stage.

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
                        # Other dependencies may be missing too: they are looked up on waking.
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
    """Return each task's place in a row, counted from 0; for a duplicate, the first place."""
    found: dict[Task, int] = {}
    for place, task in enumerate(row):
        if task is not None:
            found.setdefault(task, place)
    return found


class RowWriter:
    """A writer of a stage's tasks, which counts the microbatches of each kind and chunk.

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
        """Add the next microbatch of each (kind, chunk) in order; repeat this `times` times."""
        for _ in range(times):
            for kind, chunk in pattern:
                self.tasks.append(Task(kind, chunk, self.count[kind, chunk]))
                self.count[kind, chunk] += 1


def refuse_small(name: str, stages: int, microbatches: int) -> None:
    """Raise ConfigError unless there is at least a stage and a microbatch."""
    if stages < 1 or microbatches < 1:
        raise ConfigError(
            f"schedule {name}: {stages} stages and {microbatches} microbatches: give at least one "
            "of each"
        )


def refuse_fewer(name: str, stages: int, microbatches: int, least: int, instead: str) -> None:
    """Raise ConfigError where a schedule has too few microbatches for its stages."""
    refuse_small(name, stages, microbatches)
    if microbatches < least:
        raise ConfigError(
            f"schedule {name}: {stages} stages need at least {least} microbatches, got "
            f"{microbatches}: use {least} or more, or fewer stages, or {instead}"
        )
