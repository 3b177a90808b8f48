"""Rows of tasks: writing a stage's down, and going through all in an order that may be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.schedules.schedule import Kind, Schedule, Slot, Task

Key = tuple[bool, int, int]
"""What others wait for: is it of the backward pass, chunk, microbatch. FULL and INPUT are one."""


def key(task: Task) -> Key:
    """The name under which a FORWARD, FULL or INPUT task is waited for."""
    return task.kind is not Kind.FORWARD, task.chunk, task.microbatch


def needed(task: Task, chunks: int) -> list[Key]:
    """What must be done before a task, as `schedule.needs` has it, one key for each dependency."""
    kind, chunk, microbatch = task.kind, task.chunk, task.microbatch
    if kind is Kind.FORWARD:
        return [(False, chunk - 1, microbatch)] if chunk else []
    if kind is Kind.WEIGHT:
        return [(True, chunk, microbatch)]
    own = (False, chunk, microbatch)
    return [own] if chunk == chunks - 1 else [own, (True, chunk + 1, microbatch)]


class Walk:
    """One pass over a schedule: each stage does its tasks in order, as soon as it may.

    Iterating gives (stage, task), every task after all it needs. It ends when all tasks are done,
    or when no stage can go on: `blocked` then holds the place in its row and the missing key of
    each stage that waits.

    >>> rows = ((Task(Kind.FORWARD, 0, 0),), (Task(Kind.FORWARD, 1, 0),))
    >>> walk = Walk(Schedule("two", microbatches=1, placement=(0, 1), rows=rows))
    >>> [(stage, str(task)) for stage, task in walk], walk.blocked
    ([(0, '0F0'), (1, '1F0')], {})
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.blocked: dict[int, tuple[int, Key]] = {}

    def __iter__(self) -> Iterator[tuple[int, Task]]:
        rows, chunks = self.schedule.rows, self.schedule.chunks
        place = [0] * len(rows)
        done: set[Key] = set()
        waiting: dict[Key, list[int]] = {}
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
                    if task.kind is not Kind.WEIGHT:
                        done.add(key(task))
                        ready.extend(waiting.pop(key(task), ()))
                place[stage] += 1


def _missing(task: Task, chunks: int, done: set[Key]) -> Key | None:
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


class Row:
    """A stage's tasks, to which the next microbatch of a kind and chunk is added.

    >>> row = Row()
    >>> row.add((Kind.FORWARD, 2), times=2)
    >>> row.add((Kind.FORWARD, 2), (Kind.FULL, 2))
    >>> [str(task) for task in row.tasks]
    ['2F0', '2F1', '2F2', '2B0']
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, *pattern: tuple[Kind, int], times: int = 1) -> None:
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
