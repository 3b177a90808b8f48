"""The temporary memory of the executor's programs, which grows with microbatches only in GPipe.

The batch is an argument of the program and does not count. Programs are compiled, but not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import get_args

from benchmarks.core import child
from benchmarks.core.report import Figure, Listing, Sheet
from benchmarks.pipeline.program import (
    ModelSize,
    arguments,
    compile_step,
    executor,
    parts,
    stage_mesh,
)
from jaxdist.hlo import program_memory
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import Activations
from jaxdist.pipeline_schedules.derived import eager
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import Schedule

STAGES, ROUNDS = 4, (1, 2, 4, 8)
"""The number of stages, and the numbers of microbatches per stage."""
FLAT_FROM = 2
"""The number of microbatches per stage that fills the pipeline, also if forward tasks run ahead."""
FLAT_GOAL, GROWS_GOAL = "<= 1.05", ">= 2"
SIZE = ModelSize(rows=256, features=256, layers=2)
BUILDS: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "1f1b, ahead": lambda p, m: eager(one_f_one_b(p, m)),
    "gpipe": gpipe,
}


@dataclass(frozen=True)
class MemoryCell:
    """The temporary memory of one program on one device."""

    name: str
    activations: Activations
    stages: int
    microbatches: int
    temp_bytes: float


@dataclass(frozen=True)
class Growth:
    """The memory of one schedule from few microbatches to many.

    Attributes:
      cells: the schedule's cells, by growing number of microbatches.
    """

    cells: tuple[MemoryCell, ...]

    @property
    def last(self) -> MemoryCell:
        """The cell with the most microbatches."""
        return self.cells[-1]

    @property
    def full(self) -> MemoryCell:
        """The cell with the fewest microbatches that fill the pipeline."""
        return next(c for c in self.cells if c.microbatches >= FLAT_FROM * c.stages)

    @property
    def ratio(self) -> float:
        """The memory of `last`, divided by the memory of `full`."""
        return self.last.temp_bytes / self.full.temp_bytes


def cell(name: str, activations: Activations, stages: int, microbatches: int) -> MemoryCell:
    """Compile one program, and return its temporary memory."""
    ticks = lower(BUILDS[name](stages, microbatches), activations=activations)
    given = arguments(SIZE, stages, microbatches)
    made = compile_step(executor(ticks, parts()), stage_mesh(stages), given, ticks.placement)
    return MemoryCell(name, activations, stages, microbatches, program_memory(made.step).temp_bytes)


def cells() -> Iterator[MemoryCell]:
    """Yield the cells of each schedule and policy, by growing number of microbatches."""
    for name, activations, rounds in product(BUILDS, get_args(Activations), ROUNDS):
        yield cell(name, activations, STAGES, rounds * STAGES)


measure = child.apart(cells, "compiling pipelines for their memory", devices=STAGES)
"""A function that returns every cell, compiled in a process with a device for each stage."""


def growths(cells: Iterable[MemoryCell]) -> list[Growth]:
    """Group the cells by schedule and policy."""
    # `groupby` needs the order in which `cells` yields them.
    groups = groupby(cells, key=lambda one: (one.name, one.activations))
    return [Growth(tuple(group)) for _, group in groups]


def figures(cells: Sequence[MemoryCell]) -> list[Figure]:
    """Return the growth of the 1F1B that grows most, and of the GPipe that grows least."""
    found = growths(cells)
    flat = max((g for g in found if g.last.name != "gpipe"), key=lambda g: g.ratio)
    grows = min((g for g in found if g.last.name == "gpipe"), key=lambda g: g.ratio)
    return [_figure("1F1B", flat, FLAT_GOAL), _figure("GPipe", grows, GROWS_GOAL)]


def _figure(name: str, growth: Growth, goal: str) -> Figure:
    full, last = growth.full, growth.last
    pair = (last.temp_bytes, full.temp_bytes)
    return Figure(
        f"{name}'s memory as microbatches grow", *pair, goal, "B",
        f"temporaries of one device at {last.microbatches} over {full.microbatches} microbatches, "
        f"{last.stages} stages, from the compiler; the worst is {last.name}, {last.activations}",
    )  # fmt: skip


def listing(cells: Sequence[MemoryCell]) -> Listing:
    """List every schedule and policy, with a column for each number of microbatches."""
    found = growths(cells)
    counts = [one.microbatches for one in found[0].cells]
    few, many = found[0].full.microbatches, counts[-1]
    sheet = Sheet[Growth](
        f"temporaries of one of {cells[0].stages} stages in MiB, from the compiler",
        {
            "schedule": "last.name",
            "activations": "last.activations",
            **{
                f"m={count}": lambda growth, at=at: f"{growth.cells[at].temp_bytes / 2**20:.2f}"
                for at, count in enumerate(counts)
            },
            f"{many} over {few}": lambda growth: f"{growth.ratio:.3f}",
        },
    )
    return sheet(found)
