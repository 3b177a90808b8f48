"""The batch norm of images beside its definition in float64, alone and over the rows of devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxdist.models.functional import functional
from jaxdist.models.images.batch_norm import BatchNorm

EPSILON, DECAY = 1e-5, 0.9
PARAMS = {"scale": np.array([0.5, 2, -1], np.float32), "bias": np.array([1, 0, -3], np.float32)}


def rows(offset, dtype="float32"):
    x = np.random.default_rng(0).normal(size=(8, 2, 3, 3)) * [1.0, 3.0, 0.2] + offset
    return jnp.asarray(x, dtype)


def norm_of(dtype):
    return functional(
        lambda rngs: BatchNorm(
            3, momentum=DECAY, epsilon=EPSILON, dtype=jnp.dtype(dtype), rngs=rngs
        )
    )


def results(x, dtype, axes=()):
    """The normalized rows, the new statistics, and the gradients of a loss."""
    norm = norm_of(dtype)
    buffers = {"mean": jnp.zeros(3), "var": jnp.ones(3)}

    def loss(x, params):
        module = norm.bind(params, buffers, statistics_over=axes)
        y = module(x).astype(jnp.float32)
        return jnp.sin(y).sum(), (y, norm.buffers_of(module))

    grads, (y, moved) = jax.grad(loss, (0, 1), has_aux=True)(x, PARAMS)
    return y, moved, grads


def defined(x):
    """The same from the formulas, in float64."""
    x = np.asarray(x, np.float64)
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    unit = (x - mean) / np.sqrt(var + EPSILON)
    y = unit * PARAMS["scale"] + PARAMS["bias"]
    dy = np.cos(y)
    bias, scale = dy.sum((0, 1, 2)), (dy * unit).sum((0, 1, 2))
    count = x.size / 3
    dx = PARAMS["scale"] / np.sqrt(var + EPSILON) * (dy - bias / count - unit * scale / count)
    moved = {"mean": (1 - DECAY) * mean, "var": DECAY + (1 - DECAY) * var}
    return y, moved, (dx, {"scale": scale, "bias": bias})


def assert_near(found, expected, tolerance):
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        size = np.abs(theirs).max()
        np.testing.assert_allclose(np.float64(ours), theirs, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(
    ("offset", "dtype", "tolerance"),
    # 300 is 1,500 deviations: E[x^2] - E[x]^2 in float32 would be wrong by a tenth.
    [(0.0, "float32", 1e-5), (300.0, "float32", 1e-3), (3.0, "bfloat16", 2e-2)],
)
def test_results_are_those_of_the_formulas(offset, dtype, tolerance):
    x = rows(offset, dtype)
    assert_near(results(x, dtype), defined(x), tolerance)


def test_half_precision_loses_less_than_its_own_rounding():
    given = np.float64(rows(np.array([100.0, 300.0, 20.0])))  # a mean of 100 deviations
    rounded = jnp.asarray(given, "bfloat16")
    var = (results(rounded, "bfloat16")[1]["var"] - DECAY) / (1 - DECAY)
    wanted, before = (np.float64(x).var((0, 1, 2)) for x in (rounded, given))
    assert (np.abs(var / wanted - 1) < np.abs(wanted / before - 1) / 5).all()


def test_a_constant_channel_has_no_negative_variance():
    x = jnp.full((8, 7, 7, 3), np.array([0.1, 255.0, -77.5]), "bfloat16")
    y, moved, grads = results(x, "bfloat16")
    assert (moved["var"] >= DECAY).all()
    assert all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves((y, grads)))


@pytest.mark.parametrize(("dtype", "sums"), [("float32", 3), ("bfloat16", 2)])
def test_devices_agree_with_one_device_in_few_sums(dtype, sums, devices):
    """A sum for the forward pass and one for the backward pass, or two and one in float32."""
    mesh, split = jax.sharding.Mesh(jax.devices()[:4], ("data",)), PartitionSpec("data")
    x = rows(np.arange(8, dtype=np.float32)[:, None, None, None], dtype)
    whole = PartitionSpec()

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=split,
        out_specs=(split, whole, (split, whole)),
        check_vma=False,
    )
    def run(x):
        y, moved, (dx, local) = results(x, dtype, ("data",))
        return y, moved, (dx, jax.tree.map(lambda grad: jax.lax.psum(grad, "data"), local))

    assert str(jax.make_jaxpr(run)(x)).count("psum") == sums + 2  # of the parameters' gradients
    assert_near(jax.jit(run)(x), results(x, dtype), 1e-5 if dtype == "float32" else 1e-2)
