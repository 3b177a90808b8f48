"""A row of the scoreboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The result of the trials of a row.

    Attributes:
      came: the result as text, with numbers.
      held: whether the goal was met in every trial.
    """

    came: str
    held: bool


@dataclass(frozen=True)
class Score:
    """A row of the scoreboard before it is tried.

    Attributes:
      what: the fault that is injected.
      goal: the goal, with which the result is compared.
      trials: the default number of trials; for faults over a longer time, the number of minutes.
      run: a function from (trials, seed) to the result.
    """

    what: str
    goal: str
    trials: int
    run: Callable[[int, int], Row]


def of(count: int, trials: int) -> str:
    """Format a count of successes; without failures, add their 95% upper bound.

    >>> of(30, 30), of(29, 30)
    ('30 of 30 (failures < 10%)', '29 of 30')
    """
    bound = f" (failures < {3 / trials:.0%})" if count == trials and trials >= 3 else ""
    return f"{count} of {trials}{bound}"
