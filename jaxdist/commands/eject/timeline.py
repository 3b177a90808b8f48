"""The timeline of a pipeline schedule in which all stages begin each tick together."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.pipeline_schedules.order import needs
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind

IDLE = ".."


def timeline(schedule: Schedule) -> list[list[str]]:
    """Return the timeline of each stage, with an entry for each tick.

    An entry is `F3` or `B3` for the forward or backward pass of microbatch 3, or `..` if the stage
    is idle. A task runs in the first tick in which all earlier tasks of its stage, and all tasks on
    which it depends, are done.

    >>> from jaxdist.pipeline_schedules.one_f_one_b import OneFOneB
    >>> for row in timeline(OneFOneB().build(2, 2)):
    ...     print(*row)
    F0 F1 .. B0 .. B1
    .. F0 B0 F1 B1 ..
    """
    waiting = [[*schedule.tasks(stage)] for stage in range(schedule.stages)]
    done: set[Task] = set()
    rows: list[list[str]] = [[] for _ in waiting]
    while any(waiting):
        ready = [
            tasks[0] if tasks and _ready(tasks[0], schedule, done) else None for tasks in waiting
        ]
        assert any(ready), "a schedule that waits for itself"
        for row, tasks, task in zip(rows, waiting, ready, strict=True):
            row.append(IDLE if task is None else f"{task.kind}{task.microbatch}")
            if task is not None:
                done.add(tasks.pop(0))
    return rows


def _ready(task: Task, schedule: Schedule, done: set[Task]) -> bool:
    # In the supported schedules, a backward pass is a single task, so its INPUT half is never a
    # separate task.
    return all(n in done for n in needs(task, schedule.chunks) if n.kind is not TaskKind.INPUT)


def slots_of(rows: Sequence[Sequence[str]]) -> int:
    """Return the smallest number of slots with which a stage's stored microbatches never collide.

    Microbatch m is in slot m modulo the number of slots. A stage stores a microbatch from its
    forward pass on the previous stage until its backward pass on this stage. On the first stage,
    the storage begins with the forward pass on this stage.

    Args:
      rows: the timeline of each stage.

    >>> slots_of([["F0", "F1", "..", "B0", "..", "B1"], ["..", "F0", "B0", "F1", "B1", ".."]])
    2
    """
    spans = [
        {
            int(task[1:]): (before.index(task), row.index(f"B{task[1:]}"))
            for task in row
            if task[0] == "F"
        }
        # `before` is the row of the previous stage, or for the first stage its own row. `zip` is
        # not strict, since the shifted rows have one row more.
        for before, row in zip((rows[0], *rows), rows, strict=False)
    ]
    count = 1
    while any(_clash(kept, count) for kept in spans):
        count += 1
    return count


def _clash(kept: dict[int, tuple[int, int]], count: int) -> bool:
    return any(
        a < b and (b - a) % count == 0 and kept[b][0] < kept[a][1] for a in kept for b in kept
    )
