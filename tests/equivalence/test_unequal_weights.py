"""A loss whose weights differ between shards, microbatches and stages is that of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from masked_losses import COUNTS, tokens_with
from pipeline_configs import config_of, experiment
from programs import put_state

from jaxdist.errors import ConfigError
from jaxdist.experiment import build

full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)
RING = {"reduce": {"type": "ring"}}
PLANS = [
    slow({"data": 4}, 1, RING),  # draws of `.ci/run` have unequal weights and reductions of ours
    full({"data": 2, "stage": 2}, 4, {}),
    slow({"data": 2}, 4, {}),
    slow({"data": 4}, 4, {**RING, "zero": {"stage": 2, "whole_below": 0}}),
    slow({"data": 4}, 1, {"deterministic": {"type": "strict", "shards": 8}}),
    slow({"data": 4, "tensor": 2}, 2, {}),
    slow({"data": 2, "stage": 2, "tensor": 2}, 4, {"zero": {"stage": 2, "whole_below": 0}}),
]


def found(mesh: dict[str, int], microbatches: int, parallel: Any, name: str) -> dict[str, Any]:
    """Loss, norm and gradients of one batch from the same parameters."""
    made = made_of(mesh, microbatches, parallel, name)
    program = made.program
    rows = {"tokens": tokens_with(COUNTS, 8), "segments": np.zeros((16, 8), np.int32)}
    batch = {k: jax.device_put(v, program.batch[k].sharding) for k, v in rows.items()}
    own = jax.device_get(jax.jit(program.home.used)(program.init()))
    state = put_state(program, replace(own, params=drawn()))
    given = program.gradients(state, batch)
    grads = jax.jit(program.home.to_step.grads)(given.grads)
    _, values = program.update(state, given)
    named = dict(zip(program.metrics, map(float, values), strict=True))
    mean = float(given.sums["loss"].total) / float(given.sums["loss"].weight)
    return {"loss": mean, "norm": named["grad_norm"], "grads": jax.tree.map(np.asarray, grads)}


def made_of(mesh: dict[str, int], microbatches: int, parallel: Any, name: str) -> Any:
    """The experiment of a plan with a loss of `masked_losses`."""
    loss = {"type": "import", "path": f"masked_losses:{name}"}
    config = config_of(mesh, loss=loss, microbatches=microbatches)
    whole = config.model_copy(update={"parallel": type(config.parallel).model_validate(parallel)})
    return build(whole, devices=jax.devices()[: int(np.prod([*mesh.values()]))])


@cache
def drawn() -> Any:
    """The parameters that one device draws, on the host."""
    return jax.device_get(experiment({"data": 1}, microbatches=1).program.init().params)


@cache
def alone(name: str) -> dict[str, Any]:
    """What one device finds with the whole batch."""
    return found({"data": 1}, 1, {}, name)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    np.testing.assert_allclose(ours["norm"], theirs["norm"], rtol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), ours["grads"], theirs["grads"]
    )


@pytest.mark.parametrize(("mesh", "microbatches", "parallel"), PLANS)
@pytest.mark.full
def test_gradients_are_those_of_one_device(
    mesh: dict[str, int], microbatches: int, parallel: Any
) -> None:
    same(found(mesh, microbatches, parallel, "as_sum"), alone("as_sum"))


@pytest.mark.slow
def test_a_penalty_for_each_unit_of_weight_is_that_of_one_device() -> None:
    parallel = {**RING, "zero": {"stage": 2, "whole_below": 0}}
    ours, theirs = found({"data": 4}, 4, parallel, "with_penalty"), alone("with_penalty")
    same(ours, theirs)
    assert ours["loss"] > 1.01 * alone("as_sum")["loss"]


@pytest.mark.slow
def test_a_scalar_is_right_where_nothing_cuts_the_batch() -> None:
    same(found({"data": 4}, 1, {}, "as_scalar"), alone("as_sum"))


@pytest.mark.parametrize(
    ("mesh", "microbatches", "parallel", "cut"),
    [
        ({"data": 1}, 4, {}, "train.microbatches 4"),
        ({"data": 2, "stage": 2}, 4, {}, "train.microbatches 4"),
        ({"data": 4}, 1, RING, "parallel.reduce.type ring"),
        (
            {"data": 4},
            1,
            {"deterministic": {"type": "strict", "shards": 8}},
            "parallel.deterministic.type strict",
        ),
        (
            {"data": 4},
            1,
            {"compression": {"type": "quantize", "bits": 8}},
            "parallel.compression.type quantize",
        ),
    ],
)
def test_a_scalar_is_refused_where_a_batch_is_cut(
    mesh: dict[str, int], microbatches: int, parallel: Any, cut: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made_of(mesh, microbatches, parallel, "as_scalar")
    text = str(caught.value)
    assert f"a loss that returns a scalar for 'loss' with {cut}" in text.replace("\n", " ")
    assert 'return {"loss": Mean(total, weight.sum())}' in text
    assert "  loss = " in text


def test_a_loss_that_adds_up_over_devices_itself_is_refused() -> None:
    """Its total would count once for each device."""
    with pytest.raises(ConfigError, match=r"with_sums_of_its_own raised NameError: .*axis name"):
        made_of({"data": 4}, 1, RING, "with_sums_of_its_own")
