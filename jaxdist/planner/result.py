"""What was found on each of several targets, in one order and with one numbering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxdist.errors import ConfigError
from jaxdist.planner.confirm import Confirmed
from jaxdist.planner.search import Found, Judged, Model, judged_of, no_plan
from jaxdist.planner.target import Target


@dataclass(frozen=True)
class Result:
    """What was found on one target.

    Attributes:
      top: the plans to print.
      confirmed: what their compiled programs say; in the same order, empty where none is compiled.
      search_seconds: of the search alone.
    """

    model: Model
    target: Target
    found: Found
    top: tuple[Judged, ...]
    confirmed: tuple[Confirmed, ...] = field(default=())
    search_seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether the compiler takes none of the plans printed."""
        return bool(self.confirmed) and bool(self.confirmed[0].refusal)

    @property
    def seconds(self) -> float:
        """Of a step of the first plan, as compiled where it is; infinite where there is none."""
        if not self.top or self.refused:
            return math.inf
        return self.confirmed[0].seconds if self.confirmed else self.top[0].seconds.total

    @property
    def chip_hours(self) -> float:
        """Of the first plan, for a billion tokens."""
        return self.target.chips * self.seconds / 3600 / self.model.tokens * 1e9

    def why_not(self) -> str:
        """In a line, why no plan is printed."""
        return str(no_plan(self.model, self.target, self.found))


def in_order(results: Sequence[Result]) -> tuple[Result, ...]:
    """The target with the fastest first plan first; those where nothing fits last.

    Raises:
      ConfigError: nothing fits on any.
    """
    if not any(one.top for one in results):
        if len(results) == 1:
            raise no_plan(results[0].model, results[0].target, results[0].found)
        raise ConfigError("; ".join(one.why_not() for one in results))
    return tuple(sorted(results, key=lambda one: (one.seconds, not one.top)))


def first_numbers(results: Sequence[Result]) -> list[int]:
    """The number of each target's first plan: plans are counted through all tables.

    Those of a target without plans are of no use.
    """
    numbers = [1]
    for one in results[:-1]:
        numbers.append(numbers[-1] + len(one.top))
    return numbers


def numbered(results: Sequence[Result], number: int) -> tuple[Result, Judged]:
    """The plan of a number; of one target also those that are not printed.

    Raises:
      ConfigError: there are not so many.
    """
    if len(results) == 1:
        return results[0], judged_of(results[0].found, results[0].top, number)
    every = [(result, one) for result in results for one in result.top]
    if number > len(every):
        raise ConfigError(
            f"--explain {number}: {len(every)} plans are printed for {len(results)} targets; give "
            f"1 to {len(every)}, or one --on alone, whose other plans have numbers too"
        )
    return every[number - 1]
