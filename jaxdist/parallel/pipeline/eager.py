"""A schedule whose forward passes run ahead far enough for lock-step ticks."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.parallel.pipeline.schedule import Kind, Schedule, Task


def eager(schedule: Schedule) -> Schedule:
    """The same tasks, each forward moved before one more backward for each chunk after its own.

    A microbatch that goes to the last chunk and back takes one tick per hop each way. With a
    forward and a backward in each tick, twice as many must be under way as where the two take
    turns: with it, 1F1B takes (m + p - 1) times forward and backward in lock step, and stage s
    holds 2 (p - s) - 1 microbatches instead of p - s. (Interleaved 1F1B as published is so already:
    Narayanan et al. 2021, arXiv 2104.04473, section 2.2.)

    >>> from jaxdist.parallel.pipeline.schedule import Kind, Schedule, Task
    >>> F, B = ((lambda k, kind=kind: Task(kind, 0, k)) for kind in (Kind.FORWARD, Kind.FULL))
    >>> row = (F(0), F(1), B(0), F(2), B(1), B(2))
    >>> last = tuple(Task(kind, 1, k) for k in range(3) for kind in (Kind.FORWARD, Kind.FULL))
    >>> print(*eager(Schedule("1f1b", 3, (0, 1), (row, last))).rows[0])
    0F0 0F1 0F2 0B0 0B1 0B2
    """
    rows = tuple(_ahead(schedule.tasks(stage), schedule.chunks) for stage in range(schedule.stages))
    return replace(schedule, name=f"{schedule.name}-eager", rows=rows)


def _ahead(tasks: tuple[Task, ...], chunks: int) -> tuple[Task, ...]:
    forwards: list[tuple[int, Task]] = []
    backwards: list[Task] = []
    least = 0
    for task in tasks:
        if task.kind is Kind.FORWARD:
            # No earlier than the forward before it: the order among forwards stays.
            least = max(least, len(backwards) - (chunks - 1 - task.chunk))
            forwards.append((least, task))
        else:
            backwards.append(task)
    row: list[Task] = []
    for done, backward in enumerate(backwards):
        while forwards and forwards[0][0] <= done:
            row.append(forwards.pop(0)[1])
        row.append(backward)
    return (*row, *(task for _, task in forwards))
