"""The bench `jaxdist bench plan`: the planner's formulas against compilers and published runs."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.report import Figure, Report, Sheet, lacking
from benchmarks.planner import lab as plan_lab
from benchmarks.planner import maxtext as beside
from benchmarks.planner.cases import PUBLISHED, Published, decoder, llama_70b
from benchmarks.planner.compiled import Program, programs
from benchmarks.planner.ranking import (
    RANKED,
    TOP_FIVE,
    Ranked,
    kendall_tau,
    laid_out,
    ranked,
)
from jaxdist.planner.search import Judged, best, judge_plan, search
from jaxdist.planner.target import Places, meshes, parse_target

PROGRAMS = 60
SEED = 3
"""The seed of the draws; the factors of memory were chosen with draws of the seeds 1 and 2."""


def bench(programs: int = PROGRAMS, maxtext: Path | None = None, lab: bool = False) -> Report:
    """Compare the planner's memory, time, ranking and search with compilers and published runs.

    Args:
      programs: the number of drawn plans whose memory the compiler lays out, in seconds each. If it
        is not 0, six plans are also compiled, in minutes each.
      maxtext: a directory that `scripts/maxtext` has written, to compare with.
      lab: whether to time only plans on slow links (see scripts/lab), in ten minutes.
    """
    if lab:
        return plan_lab.bench()
    against = against_rows()
    figures = [*published_figures(), *search_figures(), against_figure(against)]
    if maxtext is not None:
        figures += beside.figures(maxtext)
    listings = [published_listing(PUBLISHED), against_listing(against)]
    if not programs:
        return Report("plan", figures, listings)
    if reason := lacking("libtpu"):
        return Report("plan", [*figures, Figure.skipped("programs", reason)], listings)
    found = compiled(programs)
    figures += [*memory_figures(found), fits_figure(laid_out(TOP_FIVE, 5))]
    six = ranked(RANKED)
    figures.append(ranking_figure(six))
    listings += [memory_listing(found), ranking_listing(six)]
    return Report("plan", figures, listings)


def compiled(count: int) -> list[Program]:
    """Return the drawn plans that the compiler accepts, with their memory."""
    found = []
    for one in programs(SEED, count):
        print(f"{one.drawn.plan.words()}, {one.drawn.topology}", file=sys.stderr)
        found.append(one)
    return [one for one in found if not one.compiled.refusal]


def places_of(topology: str, sizes: tuple[int, int, int]) -> Places:
    """Return the places of stage, data and tensor on a topology."""
    return next(one for one in meshes(parse_target(topology)) if one.sizes == sizes)


def judged(row: Published) -> Judged:
    """Return the formulas' results for a published plan."""
    plan = row.plan
    places = places_of(row.topology, (plan.stage, plan.data, plan.tensor))
    return judge_plan(row.model, plan, places, parse_target(row.topology, row.slices))


def published_figures() -> list[Figure]:
    """Compare the MFU of each published run, and return the median and the worst error."""
    figures, errors = [], []
    for row in PUBLISHED:
        ours = judged(row).mfu(row.model, parse_target(row.topology), masked=row.whole)
        name = f"MFU, {row.name}, {row.topology}, {row.plan.words()}"
        figures.append(Figure(name, ours, row.mfu, "", "", f"published: {row.source}"))
        errors.append(abs(ours / row.mfu - 1))
    of = f"of |predicted / published - 1|, {len(errors)} runs"
    median, worst = statistics.median(errors), max(errors)
    return [
        *figures,
        Figure("error of MFU, formulas alone", median, 0.05, "<= 1", "", f"median {of}"),
        Figure("worst error of MFU", worst, 0.12, "<= 1", "", f"largest {of}"),
    ]


def search_figures() -> list[Figure]:
    """Time a search of plans for 70B on 512 chips."""
    begun = time.perf_counter()
    found = search(llama_70b(1024), parse_target("v5p:8x8x8"))
    spent = time.perf_counter() - begun
    name = f"search, 70B on 512 chips, {found.count:,} plans"
    return [Figure(name, spent, 60.0, "<= 1", "s", "nothing is compiled")]


def _waits(row: Published) -> float:
    """Return the fraction of a step's time in which nothing is computed."""
    seconds = judged(row).seconds
    return (seconds.data + seconds.slow + seconds.tensor + seconds.bubble) / seconds.total


published_listing = Sheet[Published](
    "Published plans, by formula",
    {
        "model": "name",
        "chips": "topology",
        "plan": lambda row: row.plan.words(),
        "step": (lambda row: judged(row).seconds.total, "s"),
        "waits": _waits,
    },
)
"""The listing of the published plans, with the part of their time that waits, by formula."""


@dataclass(frozen=True)
class Against:
    """A published plan compared with the planner's first plan.

    Attributes:
      row: the published run.
      theirs: the formulas' results for the published plan.
      ours: the planner's first plan, or None if no plan fits the chips.
      rank: the rank of the published plan among the planner's five plans, or None.
    """

    row: Published
    theirs: Judged
    ours: Judged | None
    rank: int | None

    @property
    def ratio(self) -> float:
        """The predicted time of the planner's plan, divided by the time of the published plan.

        The ratio is infinite without a plan that fits.
        """
        if self.ours is None:
            return math.inf
        return self.ours.seconds.total / self.theirs.seconds.total

    def why(self) -> str:
        """Format the verdict in a line."""
        if self.ours is None:
            return "no plan fits"
        if self.rank is not None:
            return f"ours too, number {self.rank} of five"
        before, after = self.theirs.seconds.parts(), self.ours.seconds.parts()
        saved = {name: before[name] - after[name] for name in before}
        most = max(saved, key=saved.__getitem__)
        verdict = f"predicted {self.ratio:.2f} of the time: {saved[most]:.2g} s less of {most}"
        if not self.theirs.fits:
            verdict += f"; theirs takes {self.theirs.memory.total / 1e9:.0f} GB by formula"
        return verdict


def against_rows() -> list[Against]:
    """Compare each published plan with the planner's five best."""
    rows = []
    for row in PUBLISHED:
        top = best(search(row.model, parse_target(row.topology, row.slices)), 5)
        rank = next((i for i, one in enumerate(top, 1) if one.plan == row.plan), None)
        rows.append(Against(row, judged(row), next(iter(top), None), rank))
    return rows


def against_figure(rows: Sequence[Against]) -> Figure:
    """Return the share of published plans that are among the planner's five plans, or slower than
    the planner's first plan."""
    good = sum(one.rank is not None or one.ratio < 1 for one in rows)
    note = "plans among our five, or predicted slower than our first; the table has the reasons"
    if lacking_plans := sum(one.ours is None for one in rows):
        note += f"; no plan fits {lacking_plans} of the runs"
    return Figure("published plans found or beaten", good, len(rows), ">= 1", "", note)


against_listing = Sheet[Against](
    "Published plans beside ours",
    {
        "model": "row.name",
        "chips": "row.topology",
        "published": lambda one: one.row.plan.words(),
        "ours": lambda one: one.ours.plan.words() if one.ours else "-",
        "why": lambda one: one.why(),
    },
)
"""The listing of the planner's plan for each published plan, with the reason for differences."""


def error_of(one: Program) -> float:
    """Return the ratio of the memory by formula to the memory of the compiled program."""
    given, plan = one.drawn, one.drawn.plan
    places = places_of(given.topology, (plan.stage, plan.data, plan.tensor))
    mine = judge_plan(decoder(given), plan, places, parse_target(given.topology))
    return mine.memory.total / one.compiled.peak_bytes


def memory_figures(found: Sequence[Program]) -> list[Figure]:
    """Return the median error of memory, and the share of plans with an error up to 15%."""
    if not found:
        return []
    errors = [abs(error_of(one) - 1) for one in found]
    near = sum(error <= 0.15 for error in errors) / len(errors)
    note = f"|formula / compiled - 1| of {len(errors)} plans, drawn by seed {SEED}"
    return [
        Figure("error of memory, median", statistics.median(errors), 0.05, "<= 1", "", note),
        Figure("memory within 15%", near, 0.95, ">= 1", "", note),
    ]


def fits_figure(top: Sequence[Ranked]) -> Figure:
    """Count the best plans, which fit by formula, that the compiler accepts."""
    taken = sum(not one.compiled.refusal for one in top)
    note = f"the five best plans of {', '.join(one.name for one in TOP_FIVE)}; the compiler's word"
    return Figure("best plans that the compiler takes", taken, len(top), ">= 1", "", note)


memory_listing = Sheet[Program](
    "Memory of drawn plans",
    {
        "model": "drawn.model",
        "chips": "drawn.topology",
        "plan": lambda one: one.drawn.plan.words(),
        "formula": (lambda one: error_of(one) * one.compiled.peak_bytes / 1e9, "GB"),
        "compiled": (lambda one: one.compiled.peak_bytes / 1e9, "GB"),
        "ratio": error_of,
    },
)
"""The listing of the memory of every program, by formula and compiled."""


def ranking_figure(six: Sequence[Ranked]) -> Figure:
    """Return how well formulas and compiled programs agree on the order of the six best plans."""
    taken = [one for one in six if not one.compiled.refusal]
    tau = kendall_tau(
        [one.judged.seconds.total for one in taken], [one.compiled.seconds for one in taken]
    )
    note = f"Kendall's tau of the {len(taken)} best plans that the compiler takes, {RANKED.name}"
    return Figure("ranking", tau, 0.8, ">= 1", "", note)


ranking_listing = Sheet[Ranked](
    f"The best plans of {RANKED.name}",
    {
        "plan": lambda one: one.judged.plan.words(),
        "formula": ("judged.seconds.total", "s"),
        "compiled": ("compiled.seconds", "s"),
        "formula ": (lambda one: one.judged.memory.total / 1e9, "GB"),
        "compiled ": (lambda one: one.compiled.peak_bytes / 1e9, "GB"),
        "": lambda one: "refused" if one.compiled.refusal else "",
    },
)
