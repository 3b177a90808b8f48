"""The arithmetic of servers and workers, on numpy or jax arrays of equal shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from jaxdist.param_server.consistency.arrival import DelayCompensation
from jaxdist.param_server.consistency.contract import Arrival, Merge

EPSILON = 1e-7
"""The constant that is added to a running mean of squares, so that the root is never zero."""


class Array(Protocol):
    """The arithmetic that numpy's and jax's arrays share."""

    def __add__(self: ArrayT, other: ArrayT | float, /) -> ArrayT: ...
    def __sub__(self: ArrayT, other: ArrayT, /) -> ArrayT: ...
    def __mul__(self: ArrayT, other: ArrayT | float, /) -> ArrayT: ...
    def __truediv__(self: ArrayT, other: ArrayT | float, /) -> ArrayT: ...
    def __pow__(self: ArrayT, other: float, /) -> ArrayT: ...


ArrayT = TypeVar("ArrayT", bound=Array)


def combined(merge: Merge, change_of: Callable[[Arrival], ArrayT]) -> ArrayT:
    """Return the weighted sum of a merge's changes, added in order, divided by the merge's total.

    The function does not multiply by a weight of 1 or divide by a total of 1, so that a single
    change, or a mean with equal weights, rounds like a plain sum.

    Args:
      change_of: the function that returns the payload of an arrival, after the correction that the
        consistency model makes.
    """
    assert merge.parts, "a merge without parts changes nothing"
    found = None
    for part in merge.parts:
        change = change_of(part.arrival)
        scaled = change if part.weight == 1 else change * part.weight
        found = scaled if found is None else found + scaled
    assert found is not None
    return found if merge.total == 1 else found / merge.total


def elastic_difference(x: ArrayT, centre: ArrayT, alpha: float) -> ArrayT:
    """Return alpha (x - c), which an exchange of EASGD moves from the worker to the centre.

    Args:
      x: the parameters of the worker.
      centre: the parameters of the centre, c.
      alpha: the fraction of the distance between worker and centre.
    """
    return (x - centre) * alpha


def delay_compensated(
    config: DelayCompensation,
    gradient: ArrayT,
    now: ArrayT,
    then: ArrayT,
    mean_square: ArrayT | None = None,
) -> tuple[ArrayT, ArrayT | None]:
    """Correct a stale gradient g for newer parameters: g + s g g (now - then).

    The factor s is `config.strength`. If `config.decay` is set, each element of the correction is
    divided by the root of (the running mean + 1e-7).

    Args:
      config: the settings of the correction.
      gradient: the gradient g.
      now: the current parameters.
      then: the parameters from which the gradient was computed.
      mean_square: the running mean of squared gradients, which starts with zeros. It may be None
        only if `config.decay` is not set.

    Returns:
      The corrected gradient, and the next running mean, or `mean_square` unchanged (which may be
      None) if `config.decay` is not set.
    """
    square = gradient * gradient
    correction = square * (now - then) * config.strength
    if config.decay is None:
        return gradient + correction, mean_square
    assert mean_square is not None, "decay keeps a running mean"
    mean_square = mean_square * config.decay + square * (1 - config.decay)
    return gradient + correction / (mean_square + EPSILON) ** 0.5, mean_square
