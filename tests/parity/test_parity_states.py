"""Differences between traces, and between the replicas of a state."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.parity.states import replicas_apart
from jaxdist.parity.trace import Differences, Trace, trace_differences


@pytest.mark.parametrize(
    ("field", "ours", "theirs", "equal"),
    [
        ("values", math.nan, math.nan, True),  # of a batch in which nothing has weight
        ("values", math.nan, 1.0, False),
        ("values", 1.0, math.nan, False),
        ("gradients", math.nan, math.nan, False),
        ("updates", math.nan, math.nan, False),
    ],
)
def test_a_number_that_is_none_is_equal_in_values_of_both_alone(field, ours, theirs, equal):
    def trace(value: float) -> Trace:
        given = dict.fromkeys(("values", "gradients", "updates"), 1.0) | {field: value}
        return Trace(**{name: {"w": np.array(number)} for name, number in given.items()})

    found = trace_differences(trace(ours), trace(theirs))
    assert found.within(Differences(1e-6, 1e-6, 1e-6)) is equal


def test_replicas_that_are_apart_are_found(devices):
    """Rounding is let pass, as are integers and tensors of which each device has another part."""
    mesh = jax.make_mesh((2,), ("data",), devices=devices[:2])

    def array(spec, *parts):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        local = [jax.device_put(jnp.asarray(x), d) for x, d in zip(parts, devices, strict=False)]
        shape = (2 * len(parts[0]),) if spec else (len(parts[0]),)
        return jax.make_array_from_single_device_arrays(shape, sharding, local)

    split = array(("data",), [1.0, 2.0], [3.0, 4.0])
    assert replicas_apart({"split": split, "step": array((), [3], [3])}) == (
        0.0,
        "",
    )
    apart = array((), [1.0, 4.0], [2.0, 4.0])
    assert replicas_apart({"a": apart, "b": split}) == (0.25, "a")
    lost = array((), [1.0], [math.nan])
    assert replicas_apart({"a": apart, "b": lost}) == (math.inf, "b")
    both = array((), [math.nan], [math.nan])  # the gradient of a step that is skipped
    assert replicas_apart({"a": apart, "b": both}) == (0.25, "a")
