"""Models of flax linen, of equinox, and of plain functions, trained as any other."""

from __future__ import annotations

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chosen import quick
from flax import nnx
from initialized import initialized
from programs import build_program, place

import jaxdist
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.models.adapters import from_equinox, from_functions, from_linen
from jaxdist.models.loss import Mean
from jaxdist.optim.build import LambConfig

ROWS, IN, OUT = 16, 4, 3


class Linen(nn.Module):
    hidden: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(self.hidden)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(OUT)(nn.relu(x))


class Straight(nn.Module):
    """Without randomness or statistics: what any split of the batch must train alike."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(OUT)(nn.tanh(nn.Dense(8)(x)))


def init(key):
    first, last = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (IN, 8)) / 2,
        "out": {"kernel": jax.random.normal(last, (8, OUT)) / 3, "bias": jnp.zeros(OUT)},
    }


def apply(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]["kernel"] + params["out"]["bias"][None]


def rows():
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, IN)).astype(np.float32),
        "y": random.normal(size=(ROWS, OUT)).astype(np.float32),
    }


def squares(module, batch):
    each = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((each * batch["weight"]).sum(), batch["weight"].sum())}


def equinox_mlp(key):
    return equinox.nn.MLP(IN, OUT, 8, 1, key=key)


MAKES = {
    "linen": from_linen(Straight(), jnp.zeros((1, IN))),
    "functions": from_functions(init, apply),
    "equinox": from_equinox(equinox_mlp),
}


def trained(make, mesh, **plan):
    found = build_program(make, squares, LambConfig(type="lamb", learning_rate=0.05), rows(), mesh,
                          **plan)  # fmt: skip
    state, losses = found.init(), []
    for _ in range(4):
        state, values = found.train(state, place(found, rows()))
        losses.append(float(values[0]))
    return found, found.home.used(state).params, losses


@pytest.mark.full
@pytest.mark.parametrize("name", quick("linen", of=MAKES, slow=True))
def test_on_a_mesh_as_on_one_device(name):
    _, alone, expected = trained(MAKES[name], {"data": 1})
    _, found, losses = trained(MAKES[name], {"data": 4}, reduce=Ring(), zero=3, microbatches=2)
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_linen_gives_the_numbers_of_linen():
    """Parameters by their paths, statistics as buffers, dropout in training alone."""
    module = Linen()
    model = jaxdist.functional(from_linen(module, jnp.zeros((1, IN))))
    params, buffers = initialized(model)
    assert params["params"]["Dense_0"]["kernel"].shape == (IN, 8)
    x = jnp.asarray(rows()["x"])
    variables = {"params": params["params"], **buffers["buffers"]}
    bound = model.bind(params, buffers)
    bound.eval()
    expected = module.apply(variables, x, train=False)
    np.testing.assert_allclose(bound(x), expected, rtol=1e-6)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model.buffers_of(bound), buffers))
    outs = []
    for seed in (1, 1, 2):
        bound = model.bind(params, buffers, jax.random.key(seed))
        bound.train()
        outs.append(np.asarray(bound(x)))
    assert np.array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])
    mean = model.buffers_of(bound)["buffers"]["batch_stats"]["BatchNorm_0"]["mean"]
    kernel, bias = (params["params"]["Dense_0"][k] for k in ("kernel", "bias"))
    np.testing.assert_allclose(mean, 0.5 * (x @ kernel + bias[None]).mean(0), rtol=1e-4, atol=1e-6)


def test_functions_are_called_as_they_are():
    model = jaxdist.functional(from_functions(init, apply))
    params, buffers = initialized(model, 3)
    x = jnp.asarray(rows()["x"])
    assert buffers == {"buffers": {}} or not jax.tree.leaves(buffers)
    np.testing.assert_array_equal(model.bind(params, buffers)(x), apply(params["params"], x))


def test_equinox_gives_the_numbers_of_equinox():
    module = equinox_mlp(jax.random.key(0))
    bound = from_equinox(lambda _: module)(nnx.Rngs(0))
    x = jnp.asarray(rows()["x"])
    np.testing.assert_array_equal(bound(x), jax.vmap(module)(x))
