"""Tools for the rows of a schedule: dependencies of tasks, a walk over tasks, a writer of rows.

The walk visits the tasks in an order in which each task comes after the tasks that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind

Dependency = tuple[bool, int, int]
"""A result for which a task may wait: (whether a backward task computes it, chunk, microbatch).

FULL and INPUT tasks have the same result here, namely the gradient of the chunk's input.
"""


def key(task: Task) -> Dependency:
    """Return the key of the result of a FORWARD, FULL or INPUT task; other tasks may need it."""
    return task.kind is not TaskKind.FORWARD, task.chunk, task.microbatch


def needed(task: Task, chunks: int) -> list[Dependency]:
    """Return the results that a task needs; `needs` returns the tasks that compute them."""
    kind, chunk, microbatch = task.kind, task.chunk, task.microbatch
    if kind is TaskKind.FORWARD:
        return [(False, chunk - 1, microbatch)] if chunk else []
    if kind is TaskKind.WEIGHT:
        return [(True, chunk, microbatch)]
    own = (False, chunk, microbatch)
    return [own] if chunk == chunks - 1 else [own, (True, chunk + 1, microbatch)]


def needs(task: Task, chunks: int) -> tuple[Task, ...]:
    """Return the tasks whose results a task needs.

    A backward task needs the FULL or the INPUT task of the next chunk. A schedule has only one of
    these two tasks, but both are in the result.

    Args:
      task: the task that needs results.
      chunks: the number of chunks of the schedule.

    >>> [str(t) for t in needs(Task(TaskKind.FULL, chunk=0, microbatch=5), chunks=2)]
    ['0F5', '1B5', '1I5']
    """
    own, other = (TaskKind.INPUT,), (TaskKind.FULL, TaskKind.INPUT)
    backward = own if task.kind is TaskKind.WEIGHT else other
    return tuple(
        Task(kind, chunk, microbatch)
        for back, chunk, microbatch in needed(task, chunks)
        for kind in (backward if back else (TaskKind.FORWARD,))
    )


class Walk:
    """A walk over the tasks of a schedule, in which each stage runs its tasks in order.

    Iterating over a walk yields pairs (stage, task). Each task comes after the tasks whose results
    it needs. The iteration ends when all tasks are done, or when no stage can continue.

    Attributes:
      schedule: the schedule whose tasks the walk visits.
      blocked: for each stage that waits, the index of its next task in its row, and the missing
        result. After the iteration, the dict is empty if all tasks are done.

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
                    missing = next((n for n in needed(task, chunks) if n not in done), None)
                    if missing is not None:
                        # The task may lack other results too. The walk finds them when it visits
                        # the stage again.
                        waiting.setdefault(missing, []).append(stage)
                        self.blocked[stage] = (place[stage], missing)
                        break
                    yield stage, task
                    if task.kind is not TaskKind.WEIGHT:
                        done.add(key(task))
                        ready.extend(waiting.pop(key(task), ()))
                place[stage] += 1


def places(row: tuple[Slot, ...]) -> dict[Task, int]:
    """Return the index of each task in a row; a task that occurs twice has the first index."""
    found: dict[Task, int] = {}
    for place, task in enumerate(row):
        if task is not None:
            found.setdefault(task, place)
    return found


class RowWriter:
    """A writer of the tasks of a stage, which counts the microbatches of each kind and chunk.

    FULL and INPUT tasks are counted together, since a microbatch has only one of them.

    Attributes:
      tasks: the tasks that are written so far.
      count: for each pair of kind and chunk, the number of tasks that are written so far.

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
        """Add a task for each pair (kind, chunk) of a pattern, with the pair's next microbatch.

        Args:
          pattern: the pairs, in order.
          times: the number of times to write the pattern.
        """
        for _ in range(times):
            for kind, chunk in pattern:
                counted = TaskKind.FULL if kind is TaskKind.INPUT else kind
                self.tasks.append(Task(kind, chunk, self.count[counted, chunk]))
                self.count[counted, chunk] += 1


def refuse_small(name: str, stages: int, microbatches: int) -> None:
    """Raise ConfigError if there is no stage or no microbatch."""
    if stages < 1 or microbatches < 1:
        raise ConfigError(
            f"schedule {name}: {stages} stages and {microbatches} microbatches: use at least 1 "
            "stage and 1 microbatch"
        )


def refuse_fewer(name: str, stages: int, microbatches: int, least: int, instead: str) -> None:
    """Raise ConfigError if a schedule has fewer than `least` microbatches.

    Args:
      name: the name of the schedule.
      stages: the number of stages.
      microbatches: the number of microbatches.
      least: the number of microbatches that the schedule needs.
      instead: the name of another schedule, for the error message.
    """
    refuse_small(name, stages, microbatches)
    if microbatches < least:
        raise ConfigError(
            f"schedule {name}: {stages} stages need at least {least} microbatches, got "
            f"{microbatches}: use {least} or more, or fewer stages, or {instead}"
        )
