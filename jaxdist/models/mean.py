"""Sums with weights, and scalars that cannot be added up.

Everything that a loss measures is a sum with a weight: both are added over rows, microbatches and
devices, and divided once at the end.
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
    """A weighted sum and its weight, float32 scalars; the mean is total / weight."""

    total: jax.Array
    weight: jax.Array


class OpaqueMean(Mean):
    """A mean that a loss returned as a scalar; its weight is the weight of all rows of the batch.

    Only the loss knows its divisor, so the mean must never be added to the mean of other rows.
    """

    __slots__ = ()


class RootMean(NamedTuple):
    """A sum and its weight, whose mean's root is reported; measured in evaluation only."""

    total: jax.Array
    weight: jax.Array

    @staticmethod
    def value(parts: Sequence[RootMean]) -> float:
        """Return the root of the mean over all parts, added in float64, or NaN without weight."""
        total, weight = (math.fsum(map(float, column)) for column in zip(*parts, strict=True))
        return math.sqrt(total / weight) if weight else math.nan


class Ranking(NamedTuple):
    """Scores with labels, whose AUC is reported; measured in evaluation only.

    The AUC of a whole split is not a mean of the AUC of its parts, so parts are joined.

    Attributes:
      score, label, weight: `[B]`; a label is 1 or 0.
    """

    score: jax.Array
    label: jax.Array
    weight: jax.Array

    @staticmethod
    def value(parts: Sequence[Ranking]) -> float:
        """Return the area under the ROC curve of all parts together, as `auc` computes it."""
        return auc(*(np.concatenate([np.ravel(x) for x in xs]) for xs in zip(*parts, strict=True)))


def auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    """Return the share of pairs (label 1, label 0) whose scores are in order; ties count half.

    Pairs have the product of their weights. NaN if all labels with weight are equal.

    >>> auc(np.array([1.0, 2.0, 2.0]), np.array([0, 1, 0]), np.ones(3))
    0.75
    """
    order = np.argsort(score, kind="stable")
    score, label, weight = score[order], label[order], weight[order].astype(np.float64)
    ones, zeros = weight * label, weight * (1 - label)
    groups = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    up, down = np.add.reduceat(ones, groups), np.add.reduceat(zeros, groups)
    pairs = up.sum() * down.sum()
    below = np.cumsum(down) - down / 2
    return float((up * below).sum() / pairs) if pairs else math.nan


Sums = dict[str, Mean]

OPAQUE = (
    "the means of parts add up only if every row and token has the same weight, which a scalar "
    "does not show"
)
AS_MEAN = """return each sum with its weight, which add up over any parts:
    weight = batch["weight"]  # times 0 for what must not count; batch["weight"][:, None] by token
    total = (losses * weight).sum()
    return {"loss": Mean(total, weight.sum())}  # from jaxdist import Mean"""
"""Lines of code that replace a scalar in a user's loss; `losses` has a value per row or token."""


def scalars_in(sums: Sums) -> tuple[str, ...]:
    """Return the names of the values that the loss returned as scalars."""
    return tuple(sorted(name for name, mean in sums.items() if isinstance(mean, OpaqueMean)))


def check_adds_up(sums: Sums, cut: str) -> None:
    """Refuse scalars for a part of a batch, since they do not add up to the mean of the batch.

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
    """Return the divisor of a total: 1 in place of a weight of 0, so that an empty part gives 0.

    A weight of 0 always has a total of 0, and 0 / 0 would spread NaN to every sum that includes it.
    """
    return jnp.where(weight == 0, 1, weight)
