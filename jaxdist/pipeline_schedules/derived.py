"""Schedules that follow from other schedules: earlier forward tasks, or forward tasks only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxdist.pipeline_schedules.order import refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind


def eager(schedule: Schedule) -> Schedule:
    """Move forward tasks earlier, for an executor whose ticks have a forward and a backward task.

    If n chunks follow a chunk in the model, each forward task of the chunk moves ahead of the last
    n backward tasks that precede it. A microbatch takes a tick for each hop to the last chunk
    and a tick for each hop back. Therefore twice as many microbatches must be in flight as with a
    single task per tick. 1F1B with m microbatches on p stages then takes m + 2 (p - 1) ticks, and
    stage s keeps the activations of 2 (p - s) - 1 microbatches instead of p - s. The published form
    of interleaved 1F1B already has this order (Narayanan et al., arXiv 2104.04473 section 2.2).

    >>> from jaxdist.pipeline_schedules.schedule import TaskKind, Schedule, Task
    >>> kinds = (TaskKind.FORWARD, TaskKind.FULL)
    >>> F, B = ((lambda k, kind=kind: Task(kind, 0, k)) for kind in kinds)
    >>> row = (F(0), F(1), B(0), F(2), B(1), B(2))
    >>> last = tuple(Task(kind, 1, k) for k in range(3) for kind in kinds)
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
        if task.kind is TaskKind.FORWARD:
            # `max` keeps the order of forward tasks: none moves before the previous forward task.
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


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule for evaluation, which has forward tasks only.

    If the inputs of several chunks of a stage have arrived, the stage runs the last of these
    chunks. With one chunk per stage the bubble is (stages - 1) F, where F is the time of a forward
    task.

    Args:
      placement: the stage of each chunk, from the schedule for training.
      microbatches: the number of microbatches.

    Raises:
      ConfigError: there is no chunk or no microbatch.

    >>> [str(task) for task in forward_only((0, 1, 1, 0), microbatches=2).tasks(0)]
    ['0F0', '0F1', '3F0', '3F1']
    """
    stages = max(placement, default=-1) + 1
    refuse_small("forward_only", stages, microbatches)
    chunks = len(placement)
    mine = [[c for c in reversed(range(chunks)) if placement[c] == s] for s in range(stages)]
    done = [0] * chunks
    rows: list[list[Slot]] = [[] for _ in range(stages)]
    while done[-1] < microbatches:
        # All stages decide by the state before this tick, since a message that is sent in a tick
        # arrives in the next tick.
        before = [microbatches, *done]
        for stage, held in enumerate(mine):
            chunk = next((c for c in held if done[c] < before[c]), None)
            if chunk is not None:
                rows[stage].append(Task(TaskKind.FORWARD, chunk, done[chunk]))
                done[chunk] += 1
    return Schedule("forward_only", microbatches, tuple(placement), tuple(map(tuple, rows)))
