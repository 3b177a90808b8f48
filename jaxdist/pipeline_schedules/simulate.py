"""The time line of a schedule under given task times, with no device: bubbles, memory, messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from jaxdist.pipeline_schedules.check import check
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.order import Walk, key, needed
from jaxdist.pipeline_schedules.schedule import Schedule, Slot, Task, TaskKind


class Span(NamedTuple):
    """A task in time."""

    start: float
    end: float
    task: Task


@dataclass(frozen=True)
class Timeline:
    """When each stage does what.

    Attributes:
      schedule: what was simulated.
      spans: by stage, its tasks with their start and end, in order.
      peak_activations: by stage, the most activations that live at once: one microbatch through one
        chunk counts `activation` of the costs, divided by the chunks a stage holds (chunks over
        stages). With the default costs the unit is thus a microbatch through a whole stage: 1F1B
        has stages - rank. They live from the FORWARD task to the end of the FULL one, or of the
        WEIGHT one where the backward pass is split (from INPUT on, only the part `kept`).
      sent: by stage, the messages that it sends to other stages.
      received: by stage, the messages that it gets from other stages.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first task's start to the last one's end."""
        return max((row[-1].end for row in self.spans if row), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By stage, the time in which it works."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @cached_property
    def period(self) -> float:
        """Time from one step to the next when a stage may begin it before the others are done.

        The longest time between a stage's first start and its last end: equal to the makespan
        where the first stage starts first and ends last (GPipe, 1F1B, interleaved). Zero-bubble
        schedules are built for it; it takes an optimizer step that waits for no other stage
        (arXiv 2401.10241 section 4).
        """
        return max((row[-1].end - row[0].start for row in self.spans if row), default=0)

    @property
    def bubble(self) -> float:
        """Time in which the busiest stage waits, per step: the period less its work."""
        return self.period - max(self.busy, default=0)

    @property
    def bubble_fraction(self) -> float:
        """The part of a step (its period) in which the busiest stage waits."""
        return self.bubble / self.period if self.period else 0.0

    @property
    def flushed_bubble_fraction(self) -> float:
        """The bubble fraction if all stages end a step before any begins the next one."""
        return 1 - max(self.busy, default=0) / self.makespan if self.makespan else 0.0

    @property
    def messages(self) -> int:
        """Messages between stages, activations and gradients together."""
        return sum(self.sent)

    @property
    def peak(self) -> float:
        """The most activations that live at once on any stage."""
        return max(self.peak_activations, default=0)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Every stage does its tasks in order, each as soon as what it needs has arrived.

    Args:
      schedule: written-down waiting (None) takes no time of its own.
      costs: times per chunk, by default one unit for each of F, I and W and none for messages.

    Raises:
      ConfigError: the schedule breaks a rule (see `check`), or the costs do not fit its chunks.

    >>> from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
    >>> timeline = simulate(one_f_one_b(stages=4, microbatches=8))
    >>> timeline.makespan, timeline.bubble, timeline.peak_activations
    (33.0, 9.0, (4.0, 3.0, 2.0, 1.0))
    """
    check(schedule)
    costs = costs or Costs()
    spans = _spans(schedule, costs)
    sent, received = _messages(schedule)
    peaks = tuple(peak_activations(schedule, stage, costs) for stage in range(schedule.stages))
    return Timeline(schedule, spans, peaks, sent, received)


def _spans(schedule: Schedule, costs: Costs) -> tuple[tuple[Span, ...], ...]:
    chunks, placement = schedule.chunks, schedule.placement
    durations, transfers = costs.durations(chunks), costs.transfers(chunks)
    ends: dict[tuple[bool, int, int], float] = {}
    free: list[float] = [0.0] * schedule.stages
    spans: list[list[Span]] = [[] for _ in free]
    for stage, task in Walk(schedule):
        start = free[stage]
        for need in needed(task, chunks):
            end = ends[need]
            if placement[need[1]] != stage:
                end += transfers[min(need[1], task.chunk)]
            start = max(start, end)
        end = start + durations[task.kind][task.chunk]
        free[stage] = end
        if task.kind is not TaskKind.WEIGHT:
            ends[key(task)] = end
        spans[stage].append(Span(start, end, task))
    return tuple(map(tuple, spans))


def _messages(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sent, received = [0] * schedule.stages, [0] * schedule.stages
    placement = schedule.placement
    for stage in range(schedule.stages):
        for task in schedule.tasks(stage):
            if task.kind is TaskKind.WEIGHT:
                continue
            to = task.chunk + (1 if task.kind is TaskKind.FORWARD else -1)
            if 0 <= to < len(placement) and placement[to] != stage:
                sent[stage] += 1
                received[placement[to]] += 1
    return tuple(sent), tuple(received)


def peak_activations(schedule: Schedule, stage: int, costs: Costs | None = None) -> float:
    """The most activations that live at once on a stage; `Timeline` has the unit.

    In a schedule without backward tasks nothing is kept for one: an activation lives in its task.
    """
    costs = costs or Costs()
    sizes = costs.activations(schedule.chunks)
    tasks = schedule.tasks(stage)
    if all(task.kind is TaskKind.FORWARD for task in tasks):
        return max((sizes[t.chunk] for t in tasks), default=0) * schedule.stages / schedule.chunks
    change = {
        TaskKind.FORWARD: 1.0,
        TaskKind.FULL: -1.0,
        TaskKind.INPUT: costs.kept - 1,
        TaskKind.WEIGHT: -costs.kept,
    }
    live = most = 0.0
    for task in tasks:
        live += change[task.kind] * sizes[task.chunk]
        most = max(most, live)
    return most * schedule.stages / schedule.chunks


def in_ticks(schedule: Schedule) -> Schedule:
    """The schedule with None where a stage waits: each row is a time line, one unit per task.

    Raises:
      ConfigError: the schedule breaks a rule (see `check`).

    >>> from jaxdist.pipeline_schedules.gpipe import gpipe
    >>> [" ".join(str(t or "-") for t in row) for row in in_ticks(gpipe(2, 1)).rows]
    ['0F0 - - 0B0', '- 1F0 1B0 -']
    """
    timeline = simulate(schedule, Costs(full=1.0))
    rows: list[tuple[Slot, ...]] = []
    for spans in timeline.spans:
        row: list[Slot] = [None] * int(timeline.makespan)
        for span in spans:
            row[int(span.start)] = span.task
        rows.append(tuple(row))
    return replace(schedule, rows=tuple(rows))
