"""Simulated schedules against the formulas of their papers, over many sizes.

There are p stages, m microbatches and v chunks per stage; F, I and W are the times of a chunk's
forward pass and of the two halves of its backward pass. All are integers, so that the simulated
results must equal the formulas to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.core.report import Figure, Sheet, apart
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.dual_pipe_v import dual_pipe_v
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import breadth_first, interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import Schedule
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2
from jaxdist.pipeline_schedules.zero_bubble.v import v_half, v_min, zb_v

GOAL = "<= 1"
EQUAL, UNEQUAL = (1, 1, 1), (3, 4, 2)
"""The times of F, I and W."""
STAGES = (1, 2, 3, 4, 7, 8, 16, 32)
MOST = {32: 256}
"""The most microbatches by number of stages; for other numbers, four per stage."""
CHUNKS = 2

TaskTimes = tuple[int, int, int]


class Law(NamedTuple):
    """A schedule and the formulas of its paper.

    Attributes:
      build: a function from stages and microbatches to the schedule.
      bubble: a function from stages and times to the bubble, in the unit of the times.
      peak: a function from stages and microbatches to the peak memory, in microbatches through a
        whole stage, or None if only a bound is known.
      serves: whether the formulas hold for a number of stages and of microbatches.
      times: F, I and W of the simulation, which are equal if the bubble is known only for equal
        times.
    """

    build: Callable[[int, int], Schedule]
    bubble: Callable[[int, TaskTimes], float]
    peak: Callable[[int, int], float] | None
    serves: Callable[[int, int], bool] = lambda p, m: True
    times: TaskTimes = UNEQUAL


def _fill_and_drain(p: int, times: TaskTimes) -> float:
    return (p - 1) * sum(times)


LAWS = {
    "gpipe": Law(gpipe, _fill_and_drain, lambda p, m: m),
    "1f1b": Law(one_f_one_b, _fill_and_drain, lambda p, m: min(m, p)),
    # The times of a stage are v times the times of its chunks, so that the bubble, as a fraction of
    # the stage's times, is 1/v of the formula.
    "interleaved": Law(
        lambda p, m: interleaved(p, m, CHUNKS),
        _fill_and_drain,
        lambda p, m: min(p + (p - 1) / CHUNKS, m),
        lambda p, m: m % p == 0,
    ),
    "breadth_first": Law(
        lambda p, m: breadth_first(p, m, CHUNKS),
        _fill_and_drain,
        lambda p, m: m,
        lambda p, m: m >= p,
    ),
    "zb_h1": Law(
        zb_h1, lambda p, t: (p - 1) * (t[0] + t[1] - t[2]), lambda p, m: p, lambda p, m: m >= p
    ),
    "zb_h2": Law(
        zb_h2,
        lambda p, t: (p - 1) * (t[0] + t[1] - 2 * t[2]),
        lambda p, m: 2 * p - 1,
        lambda p, m: m >= 2 * p - 1,
    ),
    "zb_v": Law(zb_v, lambda p, t: 0, lambda p, m: p, lambda p, m: m >= 2 * p - 1, EQUAL),
    "v_half": Law(
        v_half,
        lambda p, t: 2 if p == 2 else 3 * p - (4 if p % 2 else 5),
        lambda p, m: (p + 1) / 2 if p % 2 else p / 2 + 1,
        lambda p, m: m >= 2 * p and p > 1,
        EQUAL,
    ),
    "v_min": Law(v_min, lambda p, t: 4 * p - 5, None, lambda p, m: m >= 2 * p and p > 1, EQUAL),
    "dual_pipe_v": Law(
        dual_pipe_v, lambda p, t: p - 1, lambda p, m: p + 0.5, lambda p, m: m >= 2 * p, EQUAL
    ),
}


class Worst(NamedTuple):
    """The size at which simulation and formula differ most.

    Attributes:
      apart: the larger of the two numbers, divided by the smaller; 1 if they are equal.
      found, formula: the simulated number, and the number by the formula.
      where: the numbers of stages and microbatches, as text.
    """

    apart: float
    found: float
    formula: float
    where: str


class FormulaCheck(NamedTuple):
    """The comparison of one schedule with its formulas over `sizes` sizes."""

    name: str
    sizes: int
    bubble: Worst
    peak: Worst | None


def sizes(stages: Iterable[int] = STAGES) -> list[tuple[int, int]]:
    """Return pairs of stages and microbatches: limits of the formulas, and many microbatches."""
    return [(p, m) for p in stages for m in sorted({1, p, 2 * p - 1, 2 * p, MOST.get(p, 4 * p)})]


def measure(
    laws: dict[str, Law] = LAWS, grid: Sequence[tuple[int, int]] = ()
) -> list[FormulaCheck]:
    """Compare every law at every size for which it holds; the default grid is `sizes`."""
    return [hold(name, law, grid or sizes()) for name, law in laws.items()]


def hold(name: str, law: Law, grid: Sequence[tuple[int, int]]) -> FormulaCheck:
    """Compare one schedule with its formulas."""
    bubbles, peaks = [], []
    for p, m in grid:
        if not law.serves(p, m):
            continue
        found, where = simulate(law.build(p, m), Costs(*law.times)), f"p={p}, m={m}"
        bubbles.append(_held(found.bubble, law.bubble(p, law.times), where))
        if law.peak:
            peaks.append(_held(found.peak, law.peak(p, m), where))
    return FormulaCheck(name, len(bubbles), _worst(bubbles), _worst(peaks) if peaks else None)


def _held(found: float, formula: float, where: str) -> Worst:
    return Worst(apart(found, formula), found, formula, where)


def _worst(found: Sequence[Worst]) -> Worst:
    """Return the worst size, and the largest of several equally bad sizes."""
    return max(reversed(found), key=lambda worst: (worst.apart, worst.formula))


def figures(held: Sequence[FormulaCheck]) -> list[Figure]:
    """Return bubble and peak, each of the schedule that is furthest from its formula."""
    found = []
    for what in ("bubble", "peak"):
        cases = [(one.name, worst) for one in held if (worst := getattr(one, what)) is not None]
        name, worst = max(cases, key=lambda case: (case[1].apart, case[1].formula))
        note = (
            f"simulated against the formula, whichever is larger over the other, up to 32 stages "
            f"and 256 microbatches; the worst of {len(cases)} schedules is {name}, {worst.where}"
        )
        both = (worst.found, worst.formula)
        title = f"{what} over its formula"
        found.append(Figure(title, *both, GOAL, "", note, paired_ratio=worst.apart))
    return found


listing = Sheet[FormulaCheck](
    "simulated over the formula, at the worst size",
    {
        "schedule": "name",
        "sizes": "sizes",
        "bubble": lambda one: f"{one.bubble.apart:.3f}",
        "peak": lambda one: one.peak and f"{one.peak.apart:.3f}",
        "worst at": "bubble.where",
    },
)
