"""BatchNorm has one meaning on every plan: the statistics of all rows of a microbatch."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from programs import build_program, place

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.models.adapters import from_linen
from jaxdist.models.layers import scan_blocks, stack
from jaxdist.models.loss import Mean
from jaxdist.optim.build import SgdConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.train.evaluate import evaluate

ROWS, RING = 16, Ring(type="ring")
SGD = SgdConfig(type="sgd", learning_rate=0.1, schedule=ScheduleConfig(type="constant"))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.normal((8, 8)) / 3, dims=("embed", "mlp"))
        self.bias = nnx.Param(rngs.normal((1, 8)), dims=(None, "embed"))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.kernel) + self.bias


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.blocks = stack(Block, 2, rngs)
        self.norms = nnx.List(
            nnx.BatchNorm(8, use_bias=False, use_scale=False, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x):
        return self.norms[1](scan_blocks(self.blocks, self.norms[0](x)))


def squares(module, batch):
    error = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((error * batch["weight"]).sum(), batch["weight"].sum())}


def batch():
    """Rows whose mean and variance differ from device to device."""
    rng = np.random.default_rng(0)
    row = np.arange(ROWS)[:, None] / ROWS
    x = rng.normal(size=(ROWS, 8)) * (1 + row) + row
    y = rng.normal(size=(ROWS, 8))
    weight = np.arange(ROWS) % 3
    return {name: v.astype(np.float32) for name, v in {"x": x, "y": y, "weight": weight}.items()}


def trained(mesh, **options):
    """Losses of three steps and of an evaluation after them; parameters and buffers."""
    found = build_program(Normed, squares, SGD, batch(), mesh, **options)
    state, losses, rows = found.init(), [], place(found, batch())
    for _ in range(3):
        state, metrics = found.train(state, rows)
        losses.append(float(metrics[0]))
    params = found.home.used(state).params
    losses.append(evaluate(found, state.params, state.buffers, [rows])["loss"])
    return losses, jax.tree.map(np.asarray, (params, state.buffers))


@cache
def left_to_xla(microbatches):
    return trained({"data": 1} if microbatches == 1 else {"data": 4}, microbatches=microbatches)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        # The rows after this one have all of it.
        pytest.param({"data": 4}, {"reduce": RING}, marks=pytest.mark.slow),
        pytest.param({"data": 4}, {"reduce": RING, "microbatches": 2}, marks=pytest.mark.slow),
        ({"data": 4}, {"reduce": RING, "zero": 3}),
        ({"data": 4}, {"reduce": Xla(), "zero": 2, "microbatches": 2}),
        pytest.param({"data": 2, "tensor": 2}, {"reduce": RING, "zero": 1}, marks=pytest.mark.full),
        ({"data": 4, "tensor": 2}, {}),
    ],
    ids=str,
)
@pytest.mark.every(3)
def test_statistics_are_those_of_all_devices(mesh, options, devices):
    """With microbatches, those of the same rows as where XLA reduces."""
    expected_losses, expected = left_to_xla(options.get("microbatches", 1))
    losses, found = trained(mesh, **options)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_local_statistics_are_each_device_own(devices):
    """The running mean is the mean of the devices' means; the loss is another."""
    losses, (_, buffers) = trained({"data": 4}, reduce=RING, global_statistics=False)
    assert abs(losses[0] / left_to_xla(1)[0][0] - 1) > 1e-2
    decay = 0.99**3
    mean = (1 - decay) * batch()["x"].mean(0)
    np.testing.assert_allclose(buffers["norms"]["0"]["mean"], mean, rtol=1e-4)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dense(8)(jnp.tanh(linen.Dense(8)(x)))


@pytest.mark.full
def test_batch_norms_of_linen_see_the_rows_of_all_devices(devices, monkeypatch):
    """In the losses, the parameters and the running statistics."""
    monkeypatch.setitem(globals(), "Normed", from_linen(Linen(), jnp.zeros((1, 8))))
    expected_losses, expected = trained({"data": 4})
    losses, found = trained({"data": 4}, reduce=RING)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
