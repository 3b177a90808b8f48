"""The values that a loss returns: sums with weights, and scalars that cannot be added up.

A loss returns each value as a total and a weight. Totals and weights are added over rows,
microbatches and devices, and the total is divided by the weight once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import ConfigError


class Mean(NamedTuple):
    """A weighted sum and its weight, in float32; the mean is total / weight."""

    total: jax.Array
    weight: jax.Array


class OpaqueMean(Mean):
    """A mean that a loss returned as a scalar; its weight is the weight of all rows of the batch.

    Only the loss knows the divisor of the mean, so the mean must never be added to the mean of
    other rows.
    """

    __slots__ = ()


class RootMean(NamedTuple):
    """A sum and its weight, for a metric that is the root of sum / weight, in evaluation only."""

    total: jax.Array
    weight: jax.Array

    @staticmethod
    def value(parts: Sequence[RootMean]) -> float:
        """Return the root of the mean over all parts, or NaN if their weights sum to 0.

        The parts are added in float64.
        """
        total, weight = (math.fsum(map(float, column)) for column in zip(*parts, strict=True))
        return math.sqrt(total / weight) if weight else math.nan


class Ranking(NamedTuple):
    """The scores and labels of examples, for the metric AUC, which only an evaluation measures.

    The AUC of a data split is not a mean over its parts, so the examples of all parts are kept.

    Attributes:
      score, label, weight: the values of each example, `[B]`; a label is 1 or 0.
    """

    score: jax.Array
    label: jax.Array
    weight: jax.Array

    @staticmethod
    def value(parts: Sequence[Ranking]) -> float:
        """Return the area under the ROC curve of all parts together, as `auc` computes it."""
        return auc(*(np.concatenate([np.ravel(x) for x in xs]) for xs in zip(*parts, strict=True)))


def auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    """Return the share of pairs (label 1, label 0) in which label 1 has the higher score.

    A tie counts half. The weight of a pair is the product of the weights of its examples. The
    result is NaN if all pairs have weight 0, or if there are no pairs.

    >>> auc(np.array([1.0, 2.0, 2.0]), np.array([0, 1, 0]), np.ones(3))
    0.75
    """
    order = np.argsort(score, kind="stable")
    # In float32, a sum of weights of 1 would stop growing at 2^24 examples, so the weights are
    # float64.
    score, label, weight = score[order], label[order], weight[order].astype(np.float64)
    ones, zeros = weight * label, weight * (1 - label)
    groups = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    up, down = np.add.reduceat(ones, groups), np.add.reduceat(zeros, groups)
    pairs = up.sum() * down.sum()
    below = np.cumsum(down) - down / 2
    return float((up * below).sum() / pairs) if pairs else math.nan


Sums = dict[str, Mean]

OPAQUE = (
    "the means of parts can be averaged only if every row and token has the same weight, and a "
    "scalar does not show these weights"
)
AS_MEAN = """return each sum with its weight, since both add up over the parts of a batch:
    weight = batch["weight"]  # times 0 for what must not count; batch["weight"][:, None] by token
    total = (losses * weight).sum()
    return {"loss": Mean(total, weight.sum())}  # from jaxdist import Mean"""
"""The lines of code, for an error message, that replace a scalar in a user's loss."""


def scalars_in(sums: Sums) -> tuple[str, ...]:
    """Return the names of the values that the loss returned as scalars."""
    return tuple(sorted(name for name, mean in sums.items() if isinstance(mean, OpaqueMean)))


def check_adds_up(sums: Sums, cut: str) -> None:
    """Refuse a loss that returns scalars, if the batch is computed in parts.

    Scalars of parts do not add up to the mean of the batch.

    Args:
      cut: the reason why the batch is computed in parts, as a phrase that follows "but".

    Raises:
      ConfigError: the loss returned a scalar; the message has the lines that return a sum instead.
    """
    names = scalars_in(sums)
    if names:
        raise ConfigError(f"{returned_scalars(names)}, but {cut}: {OPAQUE}; {AS_MEAN}")


def returned_scalars(names: Sequence[str]) -> str:
    """Return a clause that names the values that a loss returned as scalars.

    >>> returned_scalars(["loss"])
    "the loss returns a scalar for 'loss'"
    """
    return f"the loss returns a scalar for {' and '.join(map(repr, names))}"


def divisor(weight: jax.Array) -> jax.Array:
    """Return the divisor of a total: the weight, or 1 if the weight is 0.

    If the weight is 0, the total is 0 too, and the quotient becomes 0. The quotient 0 / 0 would
    spread NaN to every sum that includes it.
    """
    return jnp.where(weight == 0, 1, weight)
