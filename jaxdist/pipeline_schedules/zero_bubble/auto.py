"""The automatic zero-bubble schedule: the result of a search, given times and a limit of memory.

The search begins with the heuristic of Qi et al., arXiv 2401.10241 section 3.1. Each stage begins
with as many forward tasks as fit before the first gradient arrives, and then alternates INPUT and
FORWARD tasks. WEIGHT tasks run in the gaps, or earlier if memory is short. A small grid of the
remaining choices is tried. The paper then solves an integer program. This module instead runs a
local search over the numbers of first forward tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from jaxdist.config.schema import Config
from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.costs import Costs, CostsConfig
from jaxdist.pipeline_schedules.order import RowWriter, refuse_small
from jaxdist.pipeline_schedules.schedule import Schedule, Task, TaskKind
from jaxdist.pipeline_schedules.zero_bubble.fill import Fill

_OVERRUNS = (0.0, 0.5, 1.0)
"""The times by which the first forward tasks of a stage may end after the arrival of the first
gradient, in units of a forward task."""
_PATIENCES = (1.0, 0.5, 0.0)
_ROOM = 1e-9


class ZBAuto(Config):
    """The zero-bubble schedule that a search finds for given times and a limit of memory."""

    type: Literal["zb_auto"] = "zb_auto"
    """The name that selects this schedule in a config."""
    memory_limit: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """The limit of the activations on each stage, as a multiple of the most activations that 1F1B
    keeps on a stage."""
    costs: CostsConfig = CostsConfig()
    """The times of the tasks and the memory of activations, by stage."""
    search: Annotated[int, Field(ge=0, le=100_000)] = 30
    """The number of schedules to try after the first grid. Each schedule takes about 10 us per
    task."""

    def build(self, stages: int, microbatches: int) -> Schedule:
        return zb_auto(
            stages,
            microbatches,
            self.costs.costs(),
            memory_limit=self.memory_limit,
            search=self.search,
        )


def zb_auto(
    stages: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float = 2.0,
    search: int = 30,
) -> Schedule:
    """Search for zero-bubble schedules within a limit of memory, and return the best.

    The best schedule has the shortest period. If all times are equal, the bubble is 0 with twice
    the memory of 1F1B and at least 2 * stages - 1 microbatches. With the memory of 1F1B the bubble
    is the bubble of ZB-H1. If WEIGHT tasks are shorter than FORWARD and INPUT tasks, more memory
    shortens the bubble further, in particular if `costs.kept` is small.

    Args:
      stages: the number of stages, each with one chunk.
      microbatches: the number of microbatches.
      costs: the costs of the stages, or None for equal times.
      memory_limit: the limit of the activations on each stage, in units of the maximum of 1F1B.
        This maximum is `stages` activations, or if the sizes of the stages' activations differ, the
        largest product of stages - i and the size on stage i.
      search: the number of schedules to try after the grid of about a dozen schedules. Each
        schedule takes about 10 us per task.

    Raises:
      ConfigError: there is no stage or no microbatch, a sequence in the costs does not have a
        number for each stage, or the limit is below the memory of a single microbatch.

    >>> from jaxdist.pipeline_schedules.simulate import simulate
    >>> simulate(zb_auto(stages=4, microbatches=8)).bubble
    0.0
    """
    refuse_small("zb_auto", stages, microbatches)
    problem = _Problem(stages, microbatches, costs or Costs(), memory_limit)
    starts = dict.fromkeys(problem.starts())
    grid = [problem.fill(first, patience) for first in starts for patience in _PATIENCES]
    best = min(grid, key=lambda found: found.period)
    best = _descend(problem, best, search)
    assert best.rows is not None, "one forward pass on every stage is always within the memory"
    return Schedule("zb_auto", microbatches, tuple(range(stages)), best.rows)


class _Found(NamedTuple):
    """A schedule that the search tried.

    Attributes:
      period: the period of the schedule, or infinity if the schedule exceeds the limit of memory.
      first: for each stage, the number of forward tasks with which it begins.
      patience: the argument `patience` of `Fill`.
      rows: the tasks of each stage, or None if the schedule exceeds the limit of memory.
    """

    period: float
    first: tuple[int, ...]
    patience: float
    rows: tuple[tuple[Task, ...], ...] | None


class _Problem:
    """The problem of the search, with methods that build and vary a schedule."""

    def __init__(self, stages: int, microbatches: int, costs: Costs, memory_limit: float) -> None:
        self.stages, self.microbatches, self.costs = stages, microbatches, costs
        durations = costs.durations(stages)
        self.forward, self.back = durations[TaskKind.FORWARD], durations[TaskKind.INPUT]
        self.transfer = costs.transfers(stages)
        self.sizes = costs.activations(stages)
        self.unit = max((stages - stage) * size for stage, size in enumerate(self.sizes))
        self.limit = memory_limit * self.unit
        self.most = [self._most(stage, memory_limit) for stage in range(stages)]

    def _most(self, stage: int, memory_limit: float) -> int:
        """Return the maximum number of forward tasks with which a stage may begin.

        Raises:
          ConfigError: the limit of memory does not allow a single forward task.
        """
        size = self.sizes[stage]
        room = int(self.limit / size + _ROOM) if size else self.microbatches
        if room < 1:
            raise ConfigError(
                f"schedule zb_auto: memory_limit {memory_limit:g} allows {self.limit:g} "
                f"activations on {self.stages} stages, but a single microbatch keeps {size:g} on "
                f"stage {stage}: set memory_limit to at least {size / self.unit:g}"
            )
        return min(room, self.microbatches)

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Yield candidates for the numbers of forward tasks with which the stages begin.

        The numbers are chosen so that the forward tasks fill the time until the first gradient
        arrives.
        """
        yield self._within(range(self.stages, 0, -1))
        ends = self._eager_ends()
        for overrun in _OVERRUNS:
            first = [1] * self.stages
            gradient = ends[-1][0] + self.back[-1]
            for stage in reversed(range(self.stages - 1)):
                gradient += self.transfer[stage]
                latest = (gradient + overrun * self.forward[stage]) * (1 + _ROOM)
                fit = sum(end <= latest for end in ends[stage])
                first[stage] = max(fit, first[stage + 1] + 1)
                own = ends[stage][min(first[stage], self.microbatches) - 1]
                gradient = max(gradient, own) + self.back[stage]
            yield self._within(first)

    def _within(self, first: Iterable[int]) -> tuple[int, ...]:
        """Reduce the numbers of forward tasks with which the stages begin, where necessary.

        A number must fit the memory, and must be smaller than the number of the previous stage.
        Otherwise the stage would wait for the last of these forward tasks while gradients are
        ready. The exception is a previous stage that begins with all microbatches: this stage may
        then begin with all microbatches too.
        """
        found: list[int] = []
        for wanted, most in zip(first, self.most, strict=True):
            before = found[-1] if found else self.microbatches
            less = before if before == self.microbatches else max(before - 1, 1)
            found.append(min(wanted, most, less))
        return tuple(found)

    def _eager_ends(self) -> list[list[float]]:
        """Return the end of each forward task, by stage and microbatch, if no other tasks run."""
        arrivals = [0.0] * self.microbatches
        found = []
        for time, transfer in zip(self.forward, self.transfer, strict=True):
            free, ends = 0.0, []
            for arrival in arrivals:
                free = max(free, arrival) + time
                ends.append(free)
            arrivals = [end + transfer for end in ends]
            found.append(ends)
        return found

    def fill(self, first: tuple[int, ...], patience: float) -> _Found:
        """Build a schedule by `Fill`.

        A stage begins with forward tasks, and then alternates INPUT and FORWARD tasks.

        Args:
          first: for each stage, the number of forward tasks with which it begins.
          patience: the argument `patience` of `Fill`.
        """
        orders = []
        for stage, ahead in enumerate(first):
            row = RowWriter()
            forward, back = (TaskKind.FORWARD, stage), (TaskKind.INPUT, stage)
            row.add(forward, times=ahead)
            row.add(back, forward, times=self.microbatches - ahead)
            row.add(back, times=ahead)
            orders.append(row.tasks)
        run = Fill(range(self.stages), orders, self.costs, self.limit, patience)
        period = max(run.spent) if run.rows is not None else float("inf")
        return _Found(period, first, patience, run.rows)

    def around(self, found: _Found) -> Iterator[_Found]:
        """Yield schedules that differ little from `found`.

        These schedules begin with one forward task more or fewer on the first stages, or have a
        patience that differs by 0.25.
        """
        for change in (1, -1):
            for last in range(self.stages):
                moved = [n + change if s <= last else n for s, n in enumerate(found.first)]
                first = self._within(max(n, 1) for n in moved)
                if first != found.first:
                    yield self.fill(first, found.patience)
        for patience in (found.patience - 0.25, found.patience + 0.25):
            if 0 <= patience <= 1:
                yield self.fill(found.first, patience)


def _descend(problem: _Problem, found: _Found, tries: int) -> _Found:
    """Return the result of a local search from `found`.

    The search moves to the first neighbor with a shorter period. The search ends if no neighbor is
    better, or after `tries` schedules.
    """
    neighbours = problem.around(found)
    for _ in range(tries):
        tried = next(neighbours, None)
        if tried is None:
            break
        if tried.period < found.period:
            found, neighbours = tried, problem.around(tried)
    return found
