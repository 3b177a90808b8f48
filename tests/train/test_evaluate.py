"""Means over a held-out split, where there is nothing to take the mean of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxdist.errors import ConfigError, RunError
from jaxdist.models.loss import as_sums
from jaxdist.models.mean import Mean
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
    with pytest.raises(RunError, match=r"have weight 0 .*2 batches.*'weight'.* above 0"):
        means_of({"loss": (0.0, 0.0)}, {"loss": (0.0, 0.0)})


def test_a_split_without_batches_has_no_loss() -> None:
    with pytest.raises(RunError, match="0 batches"):
        means_of()


def mean_of_scalars(*weights: list[float]) -> dict[str, float]:
    """What `evaluate` makes of a loss that returns the scalar 2, a list of row weights a batch."""

    def sums(params: Any, buffers: Any, batch: Any) -> Any:
        return as_sums(jnp.float32(2), batch)

    program: Any = SimpleNamespace(evaluate=sums)
    return evaluate(program, {}, {}, [{"weight": jnp.array(rows)} for rows in weights])


def test_a_scalar_of_one_whole_batch_is_the_mean() -> None:
    assert mean_of_scalars([1.0, 1.0, 1.0]) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("weights", "cut"),
    [
        ([[1.0, 1.0], [1.0, 1.0]], "the split is evaluated in 2 batches"),
        ([[1.0, 1.0, 0.0]], "some of the 3 rows of the batch are padding"),
    ],
)
def test_a_scalar_of_a_part_of_the_split_is_refused(weights: Any, cut: str) -> None:
    with pytest.raises(ConfigError, match=rf"a scalar for 'loss', but {cut}: .*\n.*weight = batch"):
        mean_of_scalars(*weights)


def test_another_mean_without_weight_is_nan() -> None:
    """Such as the accuracy on a class of which the split has no example."""
    found = means_of({"loss": (3.0, 2.0), "rare": (0.0, 0.0)})
    assert found["loss"] == 1.5
    assert math.isnan(found["rare"])


def test_the_load_of_experts_is_summed_over_the_whole_split() -> None:
    """Each batch has one expert with twice the mean load, and both batches have an even load."""
    loads: Any = [[[2.0, 0.0]], [[0.0, 2.0]]]
    batches: Any = [{"loss": (1, 1), "expert_load": (load, 1)} for load in loads]
    assert means_of(*batches)["max_vio"] == 0.0
    assert means_of(batches[0])["max_vio"] == 1.0


def test_the_imbalance_is_that_of_the_worst_layer_and_a_mean_over_layers() -> None:
    load: Any = [[3.0, 1.0], [2.0, 2.0]]
    found = means_of({"loss": (1, 1), "expert_load": (load, 1)})
    assert (found["max_vio"], found["max_vio_mean"]) == (0.5, 0.25)
