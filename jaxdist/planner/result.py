"""The results of the search on several targets, with one order and numbering of all plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jaxdist.errors import ConfigError
from jaxdist.planner.confirm import Confirmed
from jaxdist.planner.search import Judged, Model, SearchResults, judged_of, no_plan
from jaxdist.planner.target import Target


@dataclass(frozen=True)
class Result:
    """The result of the search on a target.

    Attributes:
      model: the model for which plans were searched.
      target: the target that the plans have to fit.
      found: all plans of the search.
      top: the plans to print, the fastest plan first.
      confirmed: the compiler's figures for each plan of `top`, in the same order. The tuple is
        empty if no plan is compiled.
      search_seconds: the time of the search without compilation, in seconds.
    """

    model: Model
    target: Target
    found: SearchResults
    top: tuple[Judged, ...]
    confirmed: tuple[Confirmed, ...] = field(default=())
    search_seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether the compiler refuses all printed plans."""
        return bool(self.confirmed) and bool(self.confirmed[0].refusal)

    @property
    def seconds(self) -> float:
        """The seconds of a step with the first plan, from its compiled program if there is one.

        The time is infinite if there is no plan, or if the compiler refuses all printed plans.
        """
        if not self.top or self.refused:
            return math.inf
        return self.confirmed[0].seconds if self.confirmed else self.top[0].seconds.total

    @property
    def chip_hours(self) -> float:
        """The chip-hours for a billion tokens with the first plan."""
        return self.target.chips * self.seconds / 3600 / self.model.tokens * 1e9

    def why_not(self) -> str:
        """Return a line that explains why no plan fits in memory."""
        return str(no_plan(self.model, self.target, self.found))


def in_order(results: Sequence[Result]) -> tuple[Result, ...]:
    """Return results sorted by the time of their first plan.

    Targets without a plan that fits come last.

    Raises:
      ConfigError: no plan fits on any target.
    """
    if not any(one.top for one in results):
        if len(results) == 1:
            raise no_plan(results[0].model, results[0].target, results[0].found)
        raise ConfigError("; ".join(one.why_not() for one in results))
    # The time of a target is also infinite if the compiler refuses all of its plans. Such targets
    # come before targets without any plan.
    return tuple(sorted(results, key=lambda one: (one.seconds, not one.top)))


def first_numbers(results: Sequence[Result]) -> list[int]:
    """Return the number of each target's first plan.

    The numbers of a target's plans follow the numbers of the previous target's plans. The number of
    a target without plans is meaningless.
    """
    return [*accumulate((len(one.top) for one in results[:-1]), initial=1)]


def numbered(results: Sequence[Result], number: int) -> tuple[Result, Judged]:
    """Return the result of the target to which a numbered plan belongs, and the plan.

    If there is only one target, plans that are not printed have numbers too.

    Raises:
      ConfigError: there is no plan with this number.
    """
    if len(results) == 1:
        return results[0], judged_of(results[0].found, results[0].top, number)
    every = [(result, one) for result in results for one in result.top]
    if number > len(every):
        raise ConfigError(
            f"--explain {number}: {len(every)} plans are printed for {len(results)} targets; use "
            f"a number from 1 to {len(every)}, or give --on once, so that all plans have numbers"
        )
    return every[number - 1]
