"""A row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The result of so many trials.

    Attributes:
      came: in words, with numbers.
      held: whether the goal was met in every trial.
    """

    came: str
    held: bool


@dataclass(frozen=True)
class Score:
    """A promise, and how it is tried.

    Attributes:
      what: is done.
      goal: that is held against what it comes to.
      trials: as many as fit a build; of what lasts, minutes.
      run: from (trials, seed) to a row.
    """

    what: str
    goal: str
    trials: int
    run: Callable[[int, int], Row]


def of(count: int, trials: int) -> str:
    """Format a count of successes; of no failure, also the share that failures stay below at 95%.

    >>> of(30, 30), of(29, 30)
    ('30 of 30 (failures < 10%)', '29 of 30')
    """
    bound = f" (failures < {3 / trials:.0%})" if count == trials and trials >= 3 else ""
    return f"{count} of {trials}{bound}"
