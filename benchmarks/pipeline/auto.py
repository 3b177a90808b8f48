"""The automatic zero-bubble schedule, for the models of its paper and for unequal times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.core.report import Figure, Sheet
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.auto import zb_auto

BUBBLE_PERCENT, GOAL = 1.0, "<= 1"
"""The largest allowed bubble with twice the memory of 1F1B, in percent of a period."""
STAGES = (2, 4, 8, 32)
ROUNDS = 4
"""The number of microbatches per stage."""
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.1, 1.0), (0.9, 1.0, 0.95))
"""The times of F, I and W."""
KEPT = 0.43
"""The fraction of activations that remains after a task I, in a model of the paper's width."""
MODELS = {
    "1.5B, 24": (8, 24, Costs(18.522, 18.086, 9.337, transfer=0.601, kept=0.37), (15.85, 4.46)),
    "1.5B, 32": (8, 32, Costs(18.513, 18.086, 9.331, transfer=0.626, kept=0.37), (12.42, 0.39)),
    "14.6B": (16, 48, Costs(11.347, 11.248, 8.132, transfer=0.377, kept=0.43), (13.97, 0.66)),
    "28.3B": (32, 96, Costs(10.419, 10.207, 7.715, transfer=0.408, kept=0.43), (14.21, 0.38)),
}
"""The models of arXiv 2401.10241 tables 4 and 5: stages, microbatches, milliseconds, and the
bubbles in percent that the paper's scheduler leaves in 1F1B's memory, and in twice as much."""
ROUNDING = 0.005
"""The rounding error of the paper's percentages: half of their last digit."""


@dataclass(frozen=True)
class AutoSchedule:
    """An automatic schedule, with its memory and bubble.

    Attributes:
      name: the times F, I and W, or the name of the paper's model.
      stages, microbatches: the size of the pipeline.
      memory: the limit of memory, in units of 1F1B's peak.
      peak: the memory that the schedule takes, in the same units.
      bubble_percent: the part of a period in which the busiest stage waits.
      paper_percent: the bubble of the paper's schedule, or None if the paper has none.
    """

    name: str
    stages: int
    microbatches: int
    memory: float
    peak: float
    bubble_percent: float
    paper_percent: float | None = None


def measure(
    stages: Sequence[int] = STAGES, models: Sequence[str] = tuple(MODELS)
) -> list[AutoSchedule]:
    """Schedule `TIMES` in twice 1F1B's memory, and the paper's models also in 1F1B's memory."""
    found = [
        _auto(" ".join(f"{time:g}" for time in times), p, ROUNDS * p, 2.0, costs)
        for p in stages
        for times in TIMES
        for costs in [Costs(*times, kept=KEPT)]
    ]
    for name in models:
        p, m, costs, papers = MODELS[name]
        for memory, paper in zip((1.0, 2.0), papers, strict=True):
            found.append(_auto(name, p, m, memory, costs, paper))
    return found


def _auto(
    name: str, p: int, m: int, memory: float, costs: Costs, paper: float | None = None
) -> AutoSchedule:
    made = simulate(zb_auto(p, m, costs, memory_limit=memory, search=0), costs)
    return AutoSchedule(name, p, m, memory, made.peak / p, 100 * made.bubble_fraction, paper)


def figures(autos: Sequence[AutoSchedule]) -> list[Figure]:
    """Return the worst bubble by the goal, the worst bubble by the paper, and the worst peak."""
    plain = [one for one in autos if one.paper_percent is None]
    papers = [one for one in autos if one.paper_percent is not None]
    return [
        Figure.worst(
            "zb_auto, bubble in 2x 1F1B's memory", plain,
            lambda one: (one.bubble_percent, BUBBLE_PERCENT), GOAL, "%",
            lambda one: f"against the most it should be; the worst of {len(plain)} is "
            f"{one.stages} stages, {one.microbatches} microbatches, {one.name}",
        ),
        Figure.worst(
            "zb_auto, bubble over the paper's", papers,
            lambda one: (one.bubble_percent, (one.paper_percent or 0.0) + ROUNDING), GOAL, "%",
            lambda one: "to which half of its last digit is added; the worst of "
            f"{len(papers)} is {one.name}, {one.memory:g}x memory",
        ),
        Figure.worst(
            "zb_auto, peak over its limit", autos, lambda one: (one.peak, one.memory), GOAL,
            "x 1F1B", lambda one: "",
        ),
    ]  # fmt: skip


listing = Sheet[AutoSchedule](
    "zb_auto, no search: memory in units of 1F1B's, bubbles in percent",
    {
        "times": "name",
        "stages": "stages",
        "microbatches": "microbatches",
        "limit": "memory",
        "peak": "peak",
        "bubble": "bubble_percent",
        "paper": "paper_percent",
    },
)
