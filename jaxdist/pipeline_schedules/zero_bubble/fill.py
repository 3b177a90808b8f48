"""The placement of weight tasks in the gaps between forward and input tasks of a given order.

A weight task may run any time after its input task. It is placed where its stage would wait anyway,
or where the memory that it frees is needed; the remaining weight tasks come last.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.order import Dependency, key, needed
from jaxdist.pipeline_schedules.schedule import Task, TaskKind

_SLACK = 1e-9
"""Relative tolerance for rounding in sums of activations and times."""
_UNKNOWN = float("inf")
"""The assumed arrival of a message whose task has not begun, so that any weight task fits before
the message."""


class Fill:
    """A run of the greedy placement; `rows` is its result.

    All stages are simulated at once. A free stage runs its next forward or input task if that task
    can begin now. If not, the stage runs its oldest weight task, provided that the memory is full
    or that the wait is at least `patience` times as long as the weight task.

    Attributes:
      rows: for each stage, its tasks, or None where the order cannot be kept within the limit.
      spent: for each stage, the time between its first start and its last end.
    """

    def __init__(
        self,
        placement: Sequence[int],
        orders: Sequence[Sequence[Task]],
        costs: Costs,
        limit: float,
        patience: float,
    ) -> None:
        """Run the placement.

        Args:
          orders: for each stage, FORWARD and INPUT tasks; each INPUT task implies its WEIGHT task.
          limit: the most activations that may be live at once on a stage, in the unit of `costs`.
          patience: with 0 a weight task goes into any gap, with 1 only where it delays nothing.
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
        """Start a free stage's next task, if any."""
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
        """Return the time when all dependencies of a task have arrived."""
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
        """Record when a task will end, and wake the stage that waits for it."""
        # The end is known when the task starts, so that a waiting stage can compare the rest of its
        # wait with a weight task.
        self.ends[key(task)] = end
        waiter = self.waiting.pop(key(task), None)
        if waiter is not None:
            heapq.heappush(self.events, (max(now, self.last[waiter]), waiter))
