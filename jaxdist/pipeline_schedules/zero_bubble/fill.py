"""The insertion of WEIGHT tasks into rows of FORWARD and INPUT tasks.

A WEIGHT task may run at any time after its INPUT task. A WEIGHT task is inserted at a time when the
stage would wait anyway, or when the memory that the task frees is needed. The remaining WEIGHT
tasks run last.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.order import Dependency, key, needed
from jaxdist.pipeline_schedules.schedule import Task, TaskKind

_SLACK = 1e-9
"""The relative tolerance for rounding errors in sums of activations and of times."""
_UNKNOWN = float("inf")
"""The assumed arrival of a message whose task has not begun. Before this time there is a gap for
any WEIGHT task."""


class Fill:
    """A greedy insertion of WEIGHT tasks, which runs when an instance is created.

    All stages are simulated together. A free stage runs its next FORWARD or INPUT task if this task
    can begin now. Otherwise the stage runs its oldest WEIGHT task, on one of two conditions: the
    memory is full, or the time to wait is at least `patience` times the time of the WEIGHT task.

    Attributes:
      rows: the tasks of each stage, or None if the given order does not fit the limit of memory.
      spent: for each stage, the time from the start of its first task to the end of its last task.
    """

    def __init__(
        self,
        placement: Sequence[int],
        orders: Sequence[Sequence[Task]],
        costs: Costs,
        limit: float,
        patience: float,
    ) -> None:
        """Insert the WEIGHT tasks into the rows of all stages.

        Args:
          placement: the stage of each chunk.
          orders: for each stage, its FORWARD and INPUT tasks in order. Each INPUT task has a WEIGHT
            task to insert.
          costs: the costs of the tasks.
          limit: the maximum of the live activations on a stage, in the unit of `costs`.
          patience: the minimum length of a gap, as a fraction of a WEIGHT task's time. With 0 a
            WEIGHT task runs in any gap. With 1 a WEIGHT task runs only in a gap in which it delays
            no other task.
        """
        chunks = len(placement)
        self.placement, self.orders, self.limit, self.patience = placement, orders, limit, patience
        self.durations, self.transfers = costs.durations(chunks), costs.transfers(chunks)
        self.sizes, self.kept = costs.activations(chunks), costs.kept
        self.ends: dict[Dependency, float] = {}
        self.place = [0] * len(orders)
        self.live = [0.0] * len(orders)
        self.owed: list[deque[Task]] = [deque() for _ in orders]
        self.done: list[list[Task]] = [[] for _ in orders]
        self.first: list[float | None] = [None] * len(orders)
        self.last = [0.0] * len(orders)
        self.waiting: dict[Dependency, int] = {}
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(len(orders))]
        while self.events:
            self._act(*heapq.heappop(self.events))
        whole = all(at == len(order) for at, order in zip(self.place, orders, strict=True))
        self.rows = tuple(tuple(row) for row in self.done) if whole else None

    @property
    def spent(self) -> list[float]:
        return [end - (start or 0) for start, end in zip(self.first, self.last, strict=True)]

    def _act(self, now: float, stage: int) -> None:
        """Start a task of a free stage, or record the event for which the stage waits."""
        owed = self.owed[stage]
        if self.place[stage] == len(self.orders[stage]):
            if owed:
                self._run(owed.popleft(), now, stage)
            return
        task = self.orders[stage][self.place[stage]]
        needs = needed(task, len(self.placement))
        missing = next((need for need in needs if need not in self.ends), None)
        arrival = self._arrival(task, needs) if missing is None else _UNKNOWN
        fits = task.kind is not TaskKind.FORWARD or (
            self.live[stage] + self.sizes[task.chunk] <= self.limit * (1 + _SLACK) + _SLACK
        )
        gap = self.durations[TaskKind.WEIGHT][owed[0].chunk] * self.patience if owed else 0.0
        if arrival <= now and fits:
            self.place[stage] += 1
            self._run(task, now, stage)
        elif owed and (not fits or arrival - now >= gap * (1 - _SLACK)):
            self._run(owed.popleft(), now, stage)
        elif missing is not None:
            self.waiting[missing] = stage
        elif fits:
            heapq.heappush(self.events, (arrival, stage))

    def _arrival(self, task: Task, needs: Sequence[Dependency]) -> float:
        """Return the time when all results that a task needs have arrived."""
        latest = 0.0
        for need in needs:
            away = self.placement[need[1]] != self.placement[task.chunk]
            travel = self.transfers[min(need[1], task.chunk)] if away else 0.0
            latest = max(latest, self.ends[need] + travel)
        return latest

    def _run(self, task: Task, now: float, stage: int) -> None:
        end = now + self.durations[task.kind][task.chunk]
        size = self.sizes[task.chunk]
        self.done[stage].append(task)
        if self.first[stage] is None:
            self.first[stage] = now
        self.last[stage] = end
        if task.kind is TaskKind.WEIGHT:
            self.live[stage] -= size * self.kept
        else:
            self._hand_on(task, now, end)
            self.live[stage] += size if task.kind is TaskKind.FORWARD else size * (self.kept - 1)
        if task.kind is TaskKind.INPUT:
            self.owed[stage].append(Task(TaskKind.WEIGHT, task.chunk, task.microbatch))
        heapq.heappush(self.events, (end, stage))

    def _hand_on(self, task: Task, now: float, end: float) -> None:
        """Record the end of a task, and wake the stage that waits for the task's result."""
        # The end is recorded when the task starts. A waiting stage can then compare the remaining
        # time with the time of a WEIGHT task.
        self.ends[key(task)] = end
        waiter = self.waiting.pop(key(task), None)
        if waiter is not None:
            heapq.heappush(self.events, (max(now, self.last[waiter]), waiter))
