"""The best of a few learning rates, evenly spaced in the logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
FACTOR, EXTENSIONS = 2.0, 8


def rounded(learning_rate: float) -> float:
    """The rate rounded to six digits, so that equal rates compare equal."""
    return float(f"{learning_rate:.6g}")


def search(
    start: float, run: Callable[[float], Result], score: Callable[[Result], tuple[float, ...]]
) -> Result:
    """The result of the best of `start` x 1/2, 1, 2.

    While the best is the smallest or the largest, one more beyond it is tried, up to 8 of them, so
    that the best one lies inside what was tried. Of equally good ones the smallest rate wins.

    >>> search(1.0, lambda rate: rate, lambda rate: (-abs(rate - 16.0),))
    16.0
    """
    results = {i: run(rounded(start * FACTOR**i)) for i in (-1, 0, 1)}
    for _ in range(EXTENSIONS):
        best = max(sorted(results), key=lambda i: score(results[i]))
        beyond = {min(results): min(results) - 1, max(results): max(results) + 1}.get(best)
        if beyond is None:
            break
        results[beyond] = run(rounded(start * FACTOR**beyond))
    return results[max(sorted(results), key=lambda i: score(results[i]))]
