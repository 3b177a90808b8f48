"""Means over a held-out split, where there is nothing to take the mean of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxdist.errors import RunError
from jaxdist.models.loss import Mean
from jaxdist.train.evaluate import evaluate


def means_of(*batches: dict[str, tuple[float, float]]) -> dict[str, float]:
    """What `evaluate` makes of these totals and weights, a mapping for each batch."""

    def sums(params: Any, buffers: Any, batch: Any) -> dict[str, Mean]:
        return {name: Mean(*map(jnp.float32, mean)) for name, mean in batch.items()}

    program: Any = SimpleNamespace(evaluate=sums)
    return evaluate(program, {}, {}, list[Any](batches))


def test_a_batch_without_weight_changes_nothing() -> None:
    assert means_of({"loss": (6.0, 4.0)}, {"loss": (0.0, 0.0)}) == {"loss": 1.5}


def test_a_split_in_which_no_row_has_weight_has_no_loss() -> None:
    with pytest.raises(RunError, match=r"weighs 0 .*2 batches.*'weight'.* above 0"):
        means_of({"loss": (0.0, 0.0)}, {"loss": (0.0, 0.0)})


def test_a_split_without_batches_has_no_loss() -> None:
    with pytest.raises(RunError, match="0 batches"):
        means_of()


def test_another_mean_without_weight_is_nan() -> None:
    """Such as the accuracy on a class of which the split has no example."""
    found = means_of({"loss": (3.0, 2.0), "rare": (0.0, 0.0)})
    assert found["loss"] == 1.5
    assert math.isnan(found["rare"])
