"""What one step computes, against numbers worked out without it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import build_program, place

from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.common import decay_mask
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.train.evaluate import evaluate

ROWS = 16
SGD = SgdConfig(
    type="sgd", learning_rate=0.5, momentum=0.0, schedule=ScheduleConfig(type="constant")
)


class Regression(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((4, 8)), dims=("embed", "mlp"))

    def __call__(self, x):
        return x @ self.w


def squares(module, batch):
    """Weights differ between rows, so that averaging averages would be wrong."""
    error = jnp.square(module(batch["x"])).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "weight": np.arange(ROWS, dtype=np.float32) % 3}


def program(mesh=None, *, microbatches=1, optim=SGD, module=Regression):
    mesh = mesh or {"data": 2, "tensor": 4}
    return build_program(module, squares, optim, batch(), mesh, microbatches=microbatches)


def by_hand(w, values):
    x, weight = values["x"].astype(np.float64), values["weight"].astype(np.float64)
    loss = ((x @ w) ** 2).sum(-1) @ weight / weight.sum()
    return loss, 2 * x.T @ (weight[:, None] * (x @ w)) / weight.sum()


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_one_sgd_step_by_hand(microbatches):
    found = program(microbatches=microbatches)
    state = found.init()
    before = np.asarray(state.params["w"], np.float64)
    state, metrics = found.train(state, place(found, batch()))
    loss, gradient = by_hand(before, batch())
    named = dict(zip(found.metrics, metrics.tolist(), strict=True))
    np.testing.assert_allclose(named["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(named["grad_norm"], np.linalg.norm(gradient), rtol=1e-5)
    assert named["learning_rate"] == 0.5
    np.testing.assert_allclose(state.params["w"], before - 0.5 * gradient, rtol=1e-4, atol=1e-5)
    assert int(state.step) == 1


def test_clipping_scales_the_gradient_to_the_norm():
    found = program(optim=SGD.model_copy(update={"clip_norm": 0.01}))
    state = found.init()
    before = np.asarray(state.params["w"])
    state, metrics = found.train(state, place(found, batch()))
    assert dict(zip(found.metrics, metrics.tolist(), strict=True))["grad_norm"] > 1
    moved = np.linalg.norm(np.asarray(state.params["w"]) - before)
    np.testing.assert_allclose(moved, 0.5 * 0.01, rtol=1e-4)


def test_the_state_lies_as_the_dims_say_and_is_donated():
    found = program(optim=AdamWConfig(type="adamw", learning_rate=0.1))
    state = found.init()
    moments = [m for m in jax.tree.leaves(state.opt_state) if m.shape == (4, 8)]
    assert len(moments) == 2
    for leaf in (state.params["w"], *moments):
        assert leaf.sharding.shard_shape(leaf.shape) == (4, 2)
    old = state.params["w"]
    state, _ = found.train(state, place(found, batch()))
    assert old.is_deleted()
    assert state.params["w"].sharding.shard_shape((4, 8)) == (4, 2)


def test_the_second_step_does_not_recompile():
    found = program(optim=AdamWConfig(type="adamw", learning_rate=0.1), microbatches=2)
    state = found.init()
    for _ in range(3):
        state, _ = found.train(state, place(found, batch()))
    assert found.train._cache_size() == 1


def test_the_initial_state_is_the_same_on_every_mesh():
    first, second = (program(mesh).init() for mesh in ({"data": 8}, {"data": 2, "tensor": 4}))
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_microbatches_split_rows_without_moving_them():
    """Each device splits the rows it has: the compiled step sends no row to another device."""
    found = program({"data": 8}, microbatches=2)
    args = (found.init(), place(found, batch()))
    text = found.train.lower(*args).compile().as_text()
    assert "all-reduce" in text
    for kind in ("all-to-all", "collective-permute", "all-gather"):
        assert kind not in text


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 8)), dims=("embed", "mlp"))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dropout(x @ self.w))


def test_dropout_depends_on_the_step_and_buffers_are_kept():
    found = program({"data": 8}, module=Noisy, microbatches=2)
    losses, means = [], []
    for _ in range(2):
        state = found.init()
        for _ in range(2):
            state, metrics = found.train(state, place(found, batch()))
            losses.append(float(metrics[0]))
            means.append(np.asarray(state.buffers["norm"]["mean"]))
    assert losses[0] != losses[1]
    assert losses[:2] == losses[2:]
    assert (means[0] != means[1]).any()


class Masked(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 8)), dims=("embed", "mlp"))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self):
        return self.dropout(self.w[...])


def test_each_microbatch_and_each_step_draws_its_own_mask():
    """A parameter moves by how many of the two microbatches keep it."""

    def total(module, batch):
        return {"loss": Mean(module().sum(), jnp.float32(1))}

    found = build_program(Masked, total, SGD, batch(), {"data": 1}, microbatches=2)
    state, weights = found.init(), []
    for _ in range(3):
        weights.append(np.asarray(state.params["w"]))
        state, _ = found.train(state, place(found, batch()))
    first, second = (before - after for before, after in itertools.pairwise(weights))
    assert set(first.ravel()) == {0, 0.5, 1}
    assert (first != second).any()


def test_evaluation_is_deterministic_and_exact_for_any_split():
    found = program({"data": 8})
    state, values = found.init(), batch()
    whole = evaluate(found, state.params, state.buffers, [place(found, values)])
    halves = [
        place(found, {k: np.concatenate([v[i::2], v[i::2]]) for k, v in values.items()})
        for i in range(2)
    ]
    for half in halves:
        half["weight"] = half["weight"] * place(found, {"m": np.arange(ROWS) < ROWS // 2})["m"]
    split = evaluate(found, state.params, state.buffers, halves)
    np.testing.assert_allclose(whole["loss"], split["loss"], rtol=1e-6)
    np.testing.assert_allclose(whole["loss"], by_hand(state.params["w"], values)[0], rtol=1e-5)


def test_decay_leaves_biases_and_norms_alone_also_when_stacked():
    params = {
        name: jax.ShapeDtypeStruct((2,) * n, jnp.float32)
        for name, n in {"kernel": 2, "bias": 1, "stacked": 3, "stacked_scale": 2}.items()
    }
    dims = {
        "kernel": ("embed", "mlp"),
        "bias": ("mlp",),
        "stacked": ("layers", "embed", "mlp"),
        "stacked_scale": ("layers", "embed"),
    }
    assert decay_mask(params, dims) == {
        "kernel": True,
        "bias": False,
        "stacked": True,
        "stacked_scale": False,
    }


def test_adamw_is_optax_adamw():
    config = AdamWConfig(type="adamw", learning_rate=0.1, weight_decay=0.3)
    found = program(optim=config)
    state = found.init()
    w = jnp.asarray(np.asarray(state.params["w"]))
    reference = optax.adamw(found.optimizer.schedule, weight_decay=0.3)
    opt_state = reference.init(w)
    for _ in range(3):
        state, _ = found.train(state, place(found, batch()))
        gradient = jnp.asarray(by_hand(np.asarray(w, np.float64), batch())[1], jnp.float32)
        updates, opt_state = reference.update(gradient, opt_state, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
