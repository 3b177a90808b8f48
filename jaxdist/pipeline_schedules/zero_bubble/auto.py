"""Zero bubble for given times and a given memory: a heuristic with a search around it.

The heuristic is that of Qi et al., arXiv 2401.10241 section 3.1. It takes as many forward passes as
fit before the first gradient arrives, then forward and backward in turn, with weight halves in the
gaps and where memory is short, and tries a grid of the remaining choices. Where the paper solves an
integer program, a local search changes the numbers of first forward passes.
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
"""Lengths by which the first forward passes may extend past the first gradient, in passes."""
_PATIENCES = (1.0, 0.5, 0.0)
_ROOM = 1e-9


class ZBAuto(Config):
    """Zero bubble for given times and memory: `zb_auto`."""

    type: Literal["zb_auto"] = "zb_auto"
    """Selects this schedule."""
    memory_limit: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """The most activations on any stage, in units of 1F1B's maximum."""
    costs: CostsConfig = CostsConfig()
    """Times and memory of the tasks, by stage."""
    search: Annotated[int, Field(ge=0, le=100_000)] = 30
    """Number of schedules to try after the first grid; each takes about 10 us per task."""

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
    """Return the schedule with the shortest period that was found within the memory.

    If all times are equal, there is no bubble in twice 1F1B's memory for at least 2 stages - 1
    microbatches, and the bubble of ZB-H1 in the memory of 1F1B. Where W is shorter than F and I,
    more memory shortens the bubble further; the smaller `costs.kept` is, the more it does.

    Args:
      costs: times and activations of the stages, with a chunk each; by default all times are equal.
      memory_limit: the most activations on any stage, in units of 1F1B's maximum. That is
        `stages` activations; if their sizes differ, the largest of (stages - i) times stage i's.
      search: number of schedules to try after the grid of a dozen; each takes about 10 us per task.

    Raises:
      ConfigError: no stage or microbatch, costs that do not fit, or less memory than a single
        microbatch takes.

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
    """A schedule that was tried; `rows` is None if it needs more than the memory."""

    period: float
    first: tuple[int, ...]
    patience: float
    rows: tuple[tuple[Task, ...], ...] | None


class _Problem:
    """A search problem: its stages, times and memory, and how to fill and vary a schedule."""

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
        """Return the largest number of forward passes with which a stage may begin."""
        size = self.sizes[stage]
        room = int(self.limit / size + _ROOM) if size else self.microbatches
        if room < 1:
            raise ConfigError(
                f"schedule zb_auto: memory_limit {memory_limit:g} allows {self.limit:g} "
                f"activations on {self.stages} stages, but a single microbatch leaves {size:g} "
                f"on stage {stage}: allow at least {size / self.unit:g}"
            )
        return min(room, self.microbatches)

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Yield, by stage, numbers of forward passes that fill the time to the first gradient."""
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
        """Limit each stage's number of first forward passes.

        The number must fit the memory, and be smaller than that of the previous stage.

        A stage that begins with as many forward passes as the previous stage would wait for the
        last of them while gradients are ready. If the previous stage begins with all microbatches,
        so may this stage.
        """
        found: list[int] = []
        for wanted, most in zip(first, self.most, strict=True):
            before = found[-1] if found else self.microbatches
            less = before if before == self.microbatches else max(before - 1, 1)
            found.append(min(wanted, most, less))
        return tuple(found)

    def _eager_ends(self) -> list[list[float]]:
        """Return when forward passes end, by stage and microbatch, if nothing else runs."""
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
        """Run `first` forward passes, then input and forward tasks in turn, and weight tasks."""
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
        """Yield neighbours: one forward pass more or less on the first stages, or a patience."""
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
    """Move to the first better neighbour, until there is none or the tries are spent."""
    neighbours = problem.around(found)
    for _ in range(tries):
        tried = next(neighbours, None)
        if tried is None:
            break
        if tried.period < found.period:
            found, neighbours = tried, problem.around(tried)
    return found
