"""A batch in which nothing has weight: the step is skipped, counted, and moves nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from masked_losses import COUNTS, tokens_with
from pipeline_configs import config_of
from programs import build_program, place

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.experiment import build
from jaxdist.models.loss import NextTokenConfig, next_token
from jaxdist.models.mean import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.optim.loss_scale import DynamicLossScaleConfig
from jaxdist.optim.safety import SkipSpikesConfig
from jaxdist.parallel.objective import Objective, may_weigh_nothing

ROWS = 16
full = partial(pytest.param, marks=pytest.mark.full)


class Normed(nnx.Module):
    """A layer with batch statistics, which a skipped step must not move either."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(rngs.normal((4, 8)), dims=("embed", "mlp"))
        self.norm = nnx.BatchNorm(8, use_bias=False, use_scale=False, rngs=rngs)
        self.out = nnx.Param(rngs.normal((8, 2)), dims=("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x @ self.w[...]) @ self.out[...]


def squares(module: Any, batch: Any) -> dict[str, Mean]:
    error = jnp.square(module(batch["x"]) - 1).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def rows(seed: int, weight: float = 1.0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "weight": np.full(ROWS, weight, np.float32)}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def kept(state: Any) -> list[bytes]:
    """All that a skipped step may not touch."""
    found = state.params, state.buffers, state.opt_state.inner, state.opt_state.rule
    return bits((found, state.loss_scale, state.exchange))


def step(program: Any, state: Any, batch: Any) -> tuple[Any, dict[str, float]]:
    state, values = program.train(state, place(program, batch))
    return state, dict(zip(program.metrics, values.tolist(), strict=True))


SCALE = DynamicLossScaleConfig(type="dynamic", growth_steps=2)


@pytest.mark.parametrize(
    ("mesh", "options", "optim"),
    [
        ({"data": 2}, {}, {}),
        ({"data": 2}, {"reduce": Ring(), "zero": 2}, {}),
        ({"data": 1}, {"microbatches": 2}, {"loss_scale": SCALE}),
        ({"data": 1}, {}, {"skip_nonfinite": True}),
        full({"data": 1}, {"microbatches": 2}, {"bf16_moments": True}),
        full({"data": 2}, {"reduce": Ring()}, {"skip_spikes": SkipSpikesConfig(window=1)}),
        full({"data": 2}, {"zero": 3}, {"master_weights": "bfloat16", "loss_scale": SCALE}),
    ],
)
def test_the_step_is_skipped_and_counted(
    mesh: dict[str, int], options: dict[str, Any], optim: dict[str, Any]
) -> None:
    config = AdamWConfig(type="adamw", learning_rate=0.05, weight_decay=0.1, **optim)
    program = build_program(Normed, squares, config, rows(0), mesh, **options)
    state, _ = step(program, program.init(), rows(0))
    before = kept(state)
    state, metrics = step(program, state, rows(1, weight=0))
    assert kept(state) == before
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 1)
    assert np.isnan(metrics["loss"])
    assert int(state.step) == 2
    state, metrics = step(program, state, rows(2))
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 0)
    assert np.isfinite(metrics["loss"])
    assert all(a != b for a, b in zip(bits(state.params), before, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "parallel"),
    [
        ({"data": 2, "stage": 2}, 4, {}),
        full({"data": 2}, 1, {"deterministic": {"type": "strict", "shards": 4}}),
        full({"data": 2}, 1, {"compression": {"type": "quantize", "bits": 8}}),
    ],
)
def test_masks_that_leave_nothing_skip_the_step_of_any_plan(
    mesh: dict[str, int], microbatches: int, parallel: Any
) -> None:
    loss = {"type": "import", "path": "masked_losses:as_sum"}
    config = config_of(mesh, loss=loss, microbatches=microbatches)
    plan = type(config.parallel).model_validate(parallel)
    optim = config.optim.model_copy(update={"weight_decay": 0.1})
    config = config.model_copy(update={"parallel": plan, "optim": optim})
    program = build(config, devices=jax.devices()[: int(np.prod([*mesh.values()]))]).program
    state = program.init()
    for counts, skipped in ((COUNTS, 0), ((0,) * 16, 1)):
        before = kept(state)
        given = {"tokens": tokens_with(counts, 8), "segments": np.zeros((16, 8), np.int32)}
        batch = {k: jax.device_put(v, program.batch[k].sharding) for k, v in given.items()}
        state, values = program.train(state, batch)
        named = dict(zip(program.metrics, values.tolist(), strict=True))
        assert named["skipped_in_a_row"] == skipped
        assert (kept(state) == before) == bool(skipped)


def test_only_a_weight_that_depends_on_the_data_is_watched() -> None:
    """Data without weights must not pay: the sum of their ones is known when a step is compiled."""
    made = build(config_of({"data": 1}, microbatches=1), devices=jax.devices()[:1])
    program = made.program
    assert "skipped_steps" not in program.metrics
    chunked = NextTokenConfig(type="next_token", chunks=2).build()
    for loss in (next_token, chunked):
        objective = Objective(program.model, loss)
        assert not may_weigh_nothing(objective, program.batch)
        weight = jax.ShapeDtypeStruct((16,), jnp.float32)
        assert may_weigh_nothing(objective, {**program.batch, "weight": weight})
