"""Sums with their weights, and scalars that cannot be added up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxdist.errors import ConfigError
from jaxdist.models.mean import Mean, OpaqueMean, check_adds_up, divisor, scalars_in

ONE = jnp.float32(1)
SUMS = {"loss": Mean(ONE, ONE), "error": OpaqueMean(ONE, ONE), "accuracy": OpaqueMean(ONE, ONE)}


def test_a_compiled_function_and_a_sum_of_trees_keep_what_is_a_scalar() -> None:
    doubled = jax.tree.map(jnp.add, SUMS, jax.jit(lambda sums: sums)(SUMS))
    assert scalars_in(doubled) == ("accuracy", "error")


def test_scalars_of_a_part_are_refused_by_name_with_the_lines_that_mend_it() -> None:
    with pytest.raises(ConfigError) as caught:
        check_adds_up(SUMS, "the batch is computed in 4 microbatches")
    message = str(caught.value)
    assert message.startswith(
        "the loss returns a scalar for 'accuracy' and 'error', but the batch is computed in 4 "
        "microbatches: "
    )
    assert message.count("\n") == 3
    check_adds_up({"loss": SUMS["loss"]}, "anything")


def test_a_part_without_weight_is_divided_by_one() -> None:
    assert [float(divisor(jnp.float32(w))) for w in (0, 0.5, 8)] == [1, 0.5, 8]
