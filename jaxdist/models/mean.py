"""Sums with weights, and scalars that cannot be added up.

Everything that a loss measures is a sum with a weight: both are added over rows, microbatches and
devices, and divided once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.errors import ConfigError


class Mean(NamedTuple):
    """A weighted sum and its weight, float32 scalars; the mean is total / weight."""

    total: jax.Array
    weight: jax.Array


class OpaqueMean(Mean):
    """A mean that a loss returned as a scalar; its weight is that of all rows of the batch.

    Only the loss knows its divisor, so the mean must never be added to the mean of other rows.
    """

    __slots__ = ()


Sums = dict[str, Mean]

OPAQUE = (
    "the means of parts add up only if every row and token counts the same, which a scalar does "
    "not tell"
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
