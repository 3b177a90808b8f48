"""Going through a schedule in an order that keeps every dependency, or finding that none does."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.parallel.pipeline.schedule import Kind, Schedule, Slot, Task

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
