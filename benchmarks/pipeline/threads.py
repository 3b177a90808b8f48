"""Schedules in real time: each stage is a thread whose tasks sleep.

Nothing here uses the simulated timeline: a thread runs the tasks of its row, and before each task
it waits until the dependencies have arrived from the other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from benchmarks.core.report import Figure, Sheet
from jaxdist.pipeline_schedules.check import check_schedule
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.order import Dependency, key, needed
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.simulate import Span, simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

GOAL = "<= 1.05"
UNIT_SECONDS = 0.02
REPEATS = 2
COSTS = Costs(forward=1.0, backward_input=1.25, backward_weight=0.75, transfer=0.5)
BUILDS: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}
STAGES = (4, 8)


class _Message(NamedTuple):
    """A result that one stage sends to another, and its arrival time by `time.monotonic`."""

    key: Dependency
    arrives: float


class _Stage:
    """A stage: its row, and the queue of messages from other stages."""

    def __init__(self, schedule: Schedule, number: int, costs: Costs, unit_seconds: float) -> None:
        self.schedule, self.number, self.unit_seconds = schedule, number, unit_seconds
        self.durations = costs.durations(schedule.chunks)
        self.transfers = costs.transfers(schedule.chunks)
        self.inbox: SimpleQueue[_Message] = SimpleQueue()
        self.arrivals: dict[Dependency, float] = {}

    def run(self, peers: Sequence[_Stage], begin: float) -> list[Span]:
        """Run every task in turn, and return their times by `time.monotonic`, in seconds."""
        _sleep_until(begin)
        spans = []
        for task in self.schedule.tasks(self.number):
            for need in needed(task, self.schedule.chunks):
                while need not in self.arrivals:
                    message = self.inbox.get()
                    self.arrivals[message.key] = message.arrives
                _sleep_until(self.arrivals[need])
            start = time.monotonic()
            time.sleep(self.durations[task.kind][task.chunk] * self.unit_seconds)
            end = time.monotonic()
            spans.append(Span(start, end, task))
            self._tell(task, peers, end)
        return spans

    def _tell(self, task: Task, peers: Sequence[_Stage], end: float) -> None:
        if task.kind is TaskKind.WEIGHT:
            return
        self.arrivals[key(task)] = end
        to = task.chunk + (1 if task.kind is TaskKind.FORWARD else -1)
        if not 0 <= to < self.schedule.chunks:
            return
        home = self.schedule.placement[to]
        if home != self.number:
            end += self.transfers[min(to, task.chunk)] * self.unit_seconds
            peers[home].inbox.put(_Message(key(task), end))


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def play(
    schedule: Schedule, costs: Costs | None = None, unit_seconds: float = UNIT_SECONDS
) -> tuple[tuple[Span, ...], ...]:
    """Run a schedule on threads; return each stage's spans, in seconds from the common start.

    Raises:
      ConfigError: the schedule breaks a rule.
    """
    # A schedule that breaks a rule could make a thread wait for ever.
    check_schedule(schedule)
    costs = costs or Costs()
    stages = [_Stage(schedule, s, costs, unit_seconds) for s in range(schedule.stages)]
    with ThreadPoolExecutor(len(stages)) as threads:
        # All threads have been started by then, so that all stages begin together.
        begin = time.monotonic() + 0.01
        running = [threads.submit(stage.run, stages, begin) for stage in stages]
    return tuple(
        tuple(Span(span.start - begin, span.end - begin, span.task) for span in future.result())
        for future in running
    )


class Played(NamedTuple):
    """The seconds of a schedule on threads, the fastest of all repeats, and in simulation."""

    name: str
    stages: int
    microbatches: int
    wall_seconds: float
    simulated_seconds: float

    @property
    def ratio(self) -> float:
        return self.wall_seconds / self.simulated_seconds


def measure(
    stages: Sequence[int] = STAGES,
    *,
    unit_seconds: float = UNIT_SECONDS,
    repeats: int = REPEATS,
) -> list[Played]:
    """Run every schedule with 2 p microbatches, on threads and simulated.

    The fastest of all repeats counts, since other load can only wake a thread too late.
    """
    found = []
    for p in stages:
        for name, build in BUILDS.items():
            made = build(p, 2 * p)
            walls = [
                max(row[-1].end for row in play(made, COSTS, unit_seconds)) for _ in range(repeats)
            ]
            simulated = simulate(made, COSTS).makespan * unit_seconds
            found.append(Played(name, p, 2 * p, min(walls), simulated))
    return found


def figures(played: Sequence[Played]) -> list[Figure]:
    """Return, by number of stages, the schedule that exceeds its simulated time most."""
    found = []
    for stages in sorted({one.stages for one in played}):
        cases = [one for one in played if one.stages == stages]
        note = f"stages that sleep their tasks, fastest of {REPEATS}; the worst of {len(cases)} "
        found.append(
            Figure.worst(
                f"wall time over simulated, {stages} threads",
                cases,
                lambda one: (one.wall_seconds, one.simulated_seconds),
                GOAL,
                "s",
                lambda one, note=note: f"{note}schedules is {one.name}",
            )
        )
    return found


listing = Sheet[Played](
    "stages as threads that sleep their tasks",
    {
        "schedule": "name",
        "stages": "stages",
        "microbatches": "microbatches",
        "wall": ("wall_seconds", "s"),
        "simulated": ("simulated_seconds", "s"),
        "ratio": lambda one: f"{one.ratio:.3f}",
    },
)
