"""The lowering of a pipeline schedule to ticks: the tick of each task, and the slot of each value.

Each task runs in the first tick in which the previous task of the stage has run and the inputs of
the task have arrived. The number of ticks is therefore minimal for the orders of the schedule,
since a delay of a task would let no other task run earlier.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from jaxdist.parallel.pipeline.executor.ticks import (
    KINDS,
    NONE,
    Activations,
    Channel,
    Slots,
    Ticks,
    TickTasks,
)
from jaxdist.pipeline_schedules.check import check_schedule
from jaxdist.pipeline_schedules.order import needs
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind

Clock = Mapping[Task, int]
"""The tick in which each task runs."""
VisitId = tuple[int, int]
"""The indices of a chunk and of a microbatch."""
Lives = Mapping[VisitId, tuple[int, int]]
"""For each value of a buffer, the moment of its write and the moment of its last read."""


def lower(
    schedule: Schedule, *, activations: Activations = "recompute", paired: bool | None = None
) -> Ticks:
    """Lower a schedule to ticks.

    Args:
      schedule: the schedule, an order of tasks for each stage.
      activations: the values that a backward task reads: the chunk's input, or stored residuals.
      paired: whether a stage may run a forward and a backward task in one tick, or None to choose
        the faster alternative, with the times of tasks from `typical_seconds`.

    Raises:
      ConfigError: a stage waits for a task that never runs.
    """
    if paired is not None:
        return _lower(schedule, activations, _clock(schedule, paired=paired))
    seconds = typical_seconds(activations)
    found = [_lower(schedule, activations, _clock(schedule, paired=way)) for way in (False, True)]
    return min(found, key=lambda ticks: (ticks.seconds(seconds), ticks.ticks))


def typical_seconds(activations: Activations) -> dict[TaskKind, float]:
    """Return the typical time of each kind of task, where a forward task takes 1 unit.

    A FULL backward task takes 2 units, and an INPUT or WEIGHT task takes 1 unit. With
    recomputation, FULL and INPUT tasks take 1 unit more, for the repeated forward pass.

    >>> typical_seconds("recompute")[TaskKind.FULL]
    3.0
    """
    # With recomputation the backward task repeats the forward pass.
    again = 1.0 if activations == "recompute" else 0.0
    return {
        TaskKind.FORWARD: 1.0,
        TaskKind.FULL: 2.0 + again,
        TaskKind.INPUT: 1.0 + again,
        TaskKind.WEIGHT: 1.0,
    }


def _clock(schedule: Schedule, *, paired: bool) -> dict[Task, int]:
    rows = [deque(schedule.tasks(stage)) for stage in range(schedule.stages)]
    present = {task for row in rows for task in row}
    clock: dict[Task, int] = {}

    def ready(task: Task, tick: int, before: Task | None) -> bool:
        wanted = (need for need in needs(task, schedule.chunks) if need in present)
        # For a task that has not run, `get` returns `tick`, and the comparison is false. `before`
        # is the forward task of the same tick and stage, which runs before the backward task.
        return all(clock.get(need, tick) < tick or need == before for need in wanted)

    tick = 0
    while any(rows):
        started = False
        for row in rows:
            if not row or not ready(row[0], tick, None):
                continue
            started, first = True, row.popleft()
            clock[first] = tick
            second = row[0] if row and paired and first.kind is TaskKind.FORWARD else None
            if second and second.kind is not TaskKind.FORWARD and ready(second, tick, first):
                clock[row.popleft()] = tick
        if not started:
            check_schedule(schedule)  # The error says which stages wait for each other.
            raise AssertionError(f"{schedule.name}: `check_schedule` finds every deadlock")
        tick += 1
    return clock


# A tick has three moments: forward tasks run, then backward tasks run, then values arrive. The
# lifetime of a value, from the write to the last read, is counted in these moments.
def _in_forward(tick: int) -> int:
    return 3 * tick


def _in_backward(tick: int) -> int:
    return 3 * tick + 1


def _arriving(tick: int) -> int:
    return 3 * tick + 2


def _slots(placement: Sequence[int], lives: Lives) -> tuple[dict[VisitId, int], int]:
    """Assign a slot to each value of a buffer, and return the assignment and the number of slots.

    Two values share a slot only if the last read of one value is before the write of the other
    value. The algorithm is greedy coloring of intervals in the order of their starts, which needs
    the fewest slots: the maximum number of values that a stage holds at a time.
    """
    taken: dict[VisitId, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    count: dict[int, int] = defaultdict(int)
    for visit, (written, read) in sorted(lives.items(), key=lambda item: item[1]):
        stage = placement[visit[0]]
        # The read must be strictly earlier than the write: a value still needs its slot at the
        # moment of its last read.
        while busy[stage] and busy[stage][0][0] < written:
            heapq.heappush(free[stage], heapq.heappop(busy[stage])[1])
        if not free[stage]:
            free[stage].append(count[stage])
            count[stage] += 1
        taken[visit] = heapq.heappop(free[stage])
        heapq.heappush(busy[stage], (read, taken[visit]))
    return taken, max(count.values(), default=0)


def _lives(schedule: Schedule, clock: Clock, activations: Activations) -> tuple[Lives, ...]:
    """Return the lifetimes of the values in each buffer.

    The buffers are, in this order: inputs, gradients, residuals, and values for WEIGHT tasks.
    """
    buffers: tuple[dict[VisitId, tuple[int, int]], ...] = ({}, {}, {}, {})
    inputs, gradients, residuals, kept = buffers
    last, stash = schedule.chunks - 1, activations == "stash"
    at = {(task.kind, task.chunk, task.microbatch): tick for task, tick in clock.items()}
    for (kind, chunk, microbatch), tick in at.items():
        visit = (chunk, microbatch)
        if kind is TaskKind.FORWARD:
            back = at.get((TaskKind.FULL, *visit), at.get((TaskKind.INPUT, *visit)))
            # A backward task that recomputes reads the chunk's input again. A backward task with
            # residuals does not read the input. The backward task of the last chunk reads the
            # chunk's output, which the forward task writes to the slot of the input.
            needed_back = back is not None and (not stash or chunk == last)
            until = _in_backward(back) if back is not None and needed_back else _in_forward(tick)
            if chunk > 0:
                inputs[visit] = (_arriving(at[kind, chunk - 1, microbatch]), until)
            elif stash and needed_back:
                inputs[visit] = (_in_forward(tick), until)
            if stash and back is not None:
                residuals[visit] = (_in_forward(tick), _in_backward(back))
            continue
        if kind is TaskKind.WEIGHT:
            made = at[TaskKind.INPUT, chunk, microbatch]
            kept[visit] = (_in_backward(made), _in_backward(tick))
        elif chunk < last:
            sent = at.get((TaskKind.FULL, chunk + 1, microbatch))
            sent = at[TaskKind.INPUT, chunk + 1, microbatch] if sent is None else sent
            gradients[visit] = (_arriving(sent), _in_backward(tick))
    return buffers


def _lower(schedule: Schedule, activations: Activations, clock: Clock) -> Ticks:
    buffers = _lives(schedule, clock, activations)
    coloured = [_slots(schedule.placement, lives) for lives in buffers]
    slots = [found for found, _ in coloured]
    size = (max(clock.values(), default=-1) + 1, schedule.stages)
    forward, backward = _works(schedule, clock, slots, size)
    return Ticks(
        name=schedule.name,
        microbatches=schedule.microbatches,
        stages=schedule.stages,
        placement=schedule.placement,
        forward=forward,
        backward=backward,
        outputs=_channels(schedule, clock, slots[0], size, (TaskKind.FORWARD,), 1),
        cotangents=_channels(schedule, clock, slots[1], size, (TaskKind.FULL, TaskKind.INPUT), -1),
        slots=Slots(*(count for _, count in coloured)),
        activations=activations,
    )


def _works(
    schedule: Schedule, clock: Clock, slots: list[dict[VisitId, int]], size: tuple[int, int]
) -> tuple[TickTasks, TickTasks]:
    forward, backward = (
        TickTasks(*(np.full(size, NONE, np.int32) for _ in TickTasks._fields)) for _ in range(2)
    )
    placement = schedule.placement
    for task, tick in clock.items():
        stage, visit = placement[task.chunk], (task.chunk, task.microbatch)
        work = forward if task.kind is TaskKind.FORWARD else backward
        assert work.kind[tick, stage] == NONE, (task, tick)
        local = placement[: task.chunk].count(stage)
        where = (found.get(visit, NONE) for found in slots)
        row = (KINDS.index(task.kind), task.microbatch, task.chunk, local, *where)
        for table, value in zip(work, row, strict=True):
            table[tick, stage] = value
    return forward, backward


def _channels(
    schedule: Schedule,
    clock: Clock,
    slots: Mapping[VisitId, int],
    size: tuple[int, int],
    kinds: tuple[TaskKind, ...],
    towards: int,
) -> tuple[Channel, ...]:
    """Return the channels that carry values from each chunk to an adjacent chunk.

    Args:
      schedule: the schedule that determines which stage has which chunks.
      clock: the tick of each task.
      slots: the slot of each received value, by the receiving chunk and the microbatch.
      size: the numbers of ticks and of stages.
      kinds: the kinds of the tasks whose results are sent.
      towards: 1 to send to the next chunk, -1 to send to the previous chunk.
    """
    tables: dict[int, np.ndarray] = {}
    for task, tick in clock.items():
        chunk = task.chunk + towards
        if task.kind not in kinds or not 0 <= chunk < schedule.chunks:
            continue
        stage = schedule.placement[chunk]
        # The offset counts in the shorter direction around the ring of stages: the previous stage
        # is -1, not stages - 1.
        offset = (stage - schedule.placement[task.chunk]) % schedule.stages
        offset -= schedule.stages * (2 * offset > schedule.stages)
        table = tables.setdefault(offset, np.full(size, NONE, np.int32))
        table[tick, stage] = slots[chunk, task.microbatch]
    return tuple(Channel(offset, tables[offset]) for offset in sorted(tables))
