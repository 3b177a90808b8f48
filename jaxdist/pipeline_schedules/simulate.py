"""The simulation of a schedule with given times of tasks: its timeline, bubble and memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxdist.pipeline_schedules.check import check_schedule
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.order import Walk, key, needed
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.types import JsonObject


class Span(NamedTuple):
    """A task with the times of its start and end."""

    start: float
    end: float
    task: Task


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation: the times at which each task of a schedule runs.

    The activations of a microbatch in a chunk are live from the FORWARD task to the end of the FULL
    or WEIGHT task. After an INPUT task only the fraction `Costs.kept` of these activations is live.

    Attributes:
      schedule: the simulated schedule.
      spans: for each stage, its tasks with their start and end, in order.
      peak_activations: for each stage, the maximum of the live activations. A microbatch in a chunk
        counts as `activation` of the costs, divided by the number of chunks per stage. With the
        default costs the unit is a microbatch in all chunks of a stage, so the maximum on stage i
        of 1F1B is stages - i.
      sent: for each stage, the number of messages that it sends to other stages.
      received: for each stage, the number of messages that it receives from other stages.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first task to the end of the last task of all stages."""
        return max((row[-1].end for row in self.spans if row), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each stage, the sum of the times of its tasks."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @cached_property
    def period(self) -> float:
        """The time of a step if a stage may begin the next step before other stages end this step.

        The period is the maximum over stages of the time from the start of the stage's first task
        to the end of its last task. The period equals the makespan if the first stage starts first
        and ends last (GPipe, 1F1B, interleaved). Zero-bubble schedules minimize the period. A run
        reaches this period only if the optimizer step of a stage does not wait for other stages
        (arXiv 2401.10241 section 4).
        """
        return max((row[-1].end - row[0].start for row in self.spans if row), default=0)

    @property
    def bubble(self) -> float:
        """The time in which the busiest stage waits: the period minus the stage's busy time."""
        return self.period - max(self.busy, default=0)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the period in which the busiest stage waits."""
        return self.bubble / self.period if self.period else 0.0

    @property
    def flushed_bubble_fraction(self) -> float:
        """The fraction of the makespan in which the busiest stage waits.

        The value is the bubble fraction if all stages end a step before any stage begins the next
        step.
        """
        return 1 - max(self.busy, default=0) / self.makespan if self.makespan else 0.0

    @property
    def messages(self) -> int:
        """The number of messages between stages, with activations or with gradients."""
        return sum(self.sent)

    @property
    def peak(self) -> float:
        """The largest of the stages' `peak_activations`."""
        return max(self.peak_activations, default=0)

    def as_json(self) -> JsonObject:
        """Return the main numbers of the timeline by name, with bubbles as fractions."""
        return {
            "bubble": self.bubble_fraction,
            "flushed_bubble": self.flushed_bubble_fraction,
            "makespan": self.makespan,
            "peak": self.peak,
            "messages": self.messages,
        }


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule, and return the timeline.

    Each stage runs its tasks in order. A task starts as soon as the stage is free and the results
    that the task needs have arrived.

    Args:
      schedule: the schedule. A unit of waiting (None) in a row takes no time.
      costs: the costs, or None for the default costs: FORWARD, INPUT and WEIGHT tasks take 1 unit
        of time each, and messages take no time.

    Raises:
      ConfigError: the schedule violates a rule of `check_schedule`, or a sequence in the costs does
        not have a number for each chunk.

    >>> from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
    >>> timeline = simulate(one_f_one_b(stages=4, microbatches=8))
    >>> timeline.makespan, timeline.bubble, timeline.peak_activations
    (33.0, 9.0, (4.0, 3.0, 2.0, 1.0))
    """
    check_schedule(schedule)
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
                # The time of a message between chunks c and c + 1 has the index c in both
                # directions.
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
    """Return the maximum of the live activations on a stage, in the unit of `Timeline`.

    In a schedule without backward tasks, an activation is live only during its task.
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
