"""The executor in real time, with devices whose tasks sleep by a callback to the host.

Ticks are in lock step: in each tick the stages wait for one another when they exchange their
results. A step should therefore take the sum over ticks of the busiest stage's tasks
(`Ticks.seconds`). A timeline without ticks (`simulate`), in which each stage waits only for its
dependencies, is at most as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.core import child
from benchmarks.core.report import Figure, Sheet
from benchmarks.pipeline.program import (
    ModelSize,
    PlacedStep,
    arguments,
    compile_step,
    executor,
    parts,
    stage_mesh,
)
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import Ticks
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.derived import eager
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import Schedule, TaskKind
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1

STAGES, ROUNDS = (4, 8), 2
"""The numbers of stages, and the number of microbatches per stage."""
GOAL = "<= 1.05"
UNIT_SECONDS = 0.04
"""The unit of time, long compared with the time that the host takes to begin a task."""
UNITS = {TaskKind.FORWARD: 1.0, TaskKind.INPUT: 1.25, TaskKind.WEIGHT: 0.75, TaskKind.FULL: 2.0}
"""The units that a task of a kind sleeps; a FULL task sleeps for both of its halves."""
REPEATS = 3
SIZE = ModelSize(rows=1, features=2, layers=1)
BUILDS: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "1f1b, ahead": lambda p, m: eager(one_f_one_b(p, m)),
    "gpipe": gpipe,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb_h1": zb_h1,
}


@dataclass(frozen=True)
class Slept:
    """The times of one schedule, with stashed activations, so that no task sleeps twice.

    Attributes:
      name, stages, microbatches, ticks: the schedule and its size.
      wall_seconds: the time of the fastest step, since other load can only wake a device too late.
      lock_step_seconds: the predicted time of its ticks.
      time_line_seconds: the simulated time of the schedule without ticks.
    """

    name: str
    stages: int
    microbatches: int
    ticks: int
    wall_seconds: float
    lock_step_seconds: float
    time_line_seconds: float


def sleeping(ticks: Ticks, unit_seconds: float) -> PlacedStep:
    """Compile a step whose passes sleep, and compute very little."""

    def sleep(kind: TaskKind) -> None:
        time.sleep(UNITS[kind] * unit_seconds)

    given = arguments(SIZE, ticks.chunks, ticks.microbatches)
    local = executor(ticks, parts(sleep))
    return compile_step(local, stage_mesh(ticks.stages), given, ticks.placement)


def play(
    name: str, stages: int, *, unit_seconds: float = UNIT_SECONDS, repeats: int = REPEATS
) -> Slept:
    """Run and simulate one schedule; there must be a device for each stage."""
    schedule = BUILDS[name](stages, ROUNDS * stages)
    ticks = lower(schedule, activations="stash")
    program = sleeping(ticks, unit_seconds)
    walls = []
    for _ in range(repeats):
        start = time.perf_counter()
        program()
        walls.append(time.perf_counter() - start)
    costs = Costs(*(UNITS[kind] for kind in (TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT)))
    return Slept(
        name,
        stages,
        schedule.microbatches,
        ticks.ticks,
        wall_seconds=min(walls),
        lock_step_seconds=ticks.seconds(UNITS) * unit_seconds,
        time_line_seconds=simulate(schedule, costs).makespan * unit_seconds,
    )


def measure(stages: Sequence[int] = STAGES) -> list[Slept]:
    """Run every schedule, with a process for each number of stages.

    Raises:
      RunError: a process fails or takes too long, as it would if devices waited for one another.
    """
    what = "a pipeline of {} stages that sleep"
    each = child.apart(play_all, what, devices=lambda stages: stages, compiles=False)
    return [one for count in stages for one in each(count)]


def play_all(stages: int) -> Iterator[Slept]:
    """Run every schedule on a number of stages."""
    return (play(name, stages) for name in BUILDS)


def figures(slept: Sequence[Slept]) -> list[Figure]:
    """Return, by number of stages, the schedule that is furthest from its lock-step time."""
    found = []
    for stages in sorted({one.stages for one in slept}):
        cases = [one for one in slept if one.stages == stages]
        note = (
            f"the executor's ticks on {stages} devices that sleep their tasks, fastest of "
            f"{REPEATS}, against the sum over ticks of the busiest stage; the worst of "
            f"{len(cases)} schedules is "
        )
        found.append(
            Figure.worst(
                f"wall time over lock step, {stages} stages",
                cases,
                lambda one: (one.wall_seconds, one.lock_step_seconds),
                GOAL,
                "s",
                lambda one, note=note: note + one.name,
                either=True,
            )
        )
    return found


listing = Sheet[Slept](
    "the executor on devices that sleep their tasks",
    {
        "schedule": "name",
        "p": "stages",
        "m": "microbatches",
        "ticks": "ticks",
        "wall": ("wall_seconds", "s"),
        "lock step": ("lock_step_seconds", "s"),
        "ratio": lambda one: f"{one.wall_seconds / one.lock_step_seconds:.3f}",
        "time line": ("time_line_seconds", "s"),
    },
)
"""The listing of every schedule, with its time in lock step and without ticks."""
