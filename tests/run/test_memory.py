import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import build_program, place

from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.optim.build import SgdConfig
from jaxdist.run.memory import (
    bytes_per_device,
    check_state_fits,
    check_step_fits,
    told_if_too_large,
)
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.train.state import TrainState


def state(length):
    mesh = build_mesh(MeshConfig.model_validate({"data": 2, "tensor": 4}))
    layout = make_layout(ShardingConfig(), mesh)
    w = jax.ShapeDtypeStruct((length, 8), jnp.float32, sharding=layout.sharding(("mlp", None)))
    return TrainState(step=(), params={"w": w}, opt_state=(w, w), buffers={})


def test_shards_are_counted_once_and_replicas_on_each_device():
    assert bytes_per_device(state(16)) == 3 * 4 * 8 * 4


def test_a_state_that_fits():
    check_state_fits(state(16))


def test_a_state_that_no_device_can_hold():
    with pytest.raises(RunError) as caught:
        check_state_fits(state(2**36))
    message = str(caught.value)
    assert "1,649.3 GB on each device (parameters 549.8 GB, optimizer 1,099.5 GB)" in message
    assert "mesh axis tensor" in message


def test_what_a_strategy_carries_is_told_too():
    large = state(2**36)
    with pytest.raises(RunError, match=r"optimizer 1,099.5 GB, strategy 549.8 GB\)"):
        check_state_fits(dataclasses.replace(large, outer=large.params))


class Square(nnx.Module):
    """Compares every value of an example with every other, as attention does."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((2,)), dims=(None,))

    def __call__(self, x):
        y = jnp.stack([x * self.w[0], x * self.w[1]], -1)

        def scores(carry, y_L2):
            return carry + (y_L2 @ y_L2.T).sum(), None

        return jax.lax.scan(scores, 0.0, y)[0]


def step(length):
    calls = []

    def loss(module, batch):
        calls.append(batch)
        return module(batch["x"])

    x = np.ones((8, 8), np.float32)
    optim = SgdConfig(type="sgd", learning_rate=0.1, momentum=0.0)
    found = build_program(Square, loss, optim, {"x": x}, {"data": 8})
    longer = jax.ShapeDtypeStruct((8, length), x.dtype, sharding=found.batch["x"].sharding)
    return dataclasses.replace(found, batch={"x": longer}), calls


@pytest.mark.full
def test_a_step_that_fits_is_not_traced_again():
    found, calls = step(64)
    check_step_fits(found)
    before = len(calls)
    assert before > 0
    found.train(found.init(), place(found, {"x": np.ones((8, 64), np.float32)}))
    assert len(calls) == before


def test_a_step_that_no_device_can_hold():
    message = r"\[10000000, 10000000\] of float32, 400,000.0 GB, but 8 x cpu have .*microbatches"
    with pytest.raises(RunError, match=message):
        check_step_fits(step(10_000_000)[0])


def test_running_out_of_memory_is_told_and_nothing_else_is():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 80 bytes.")
    message = r"a step does not fit the memory \(RESOURCE.*80 bytes"
    with pytest.raises(RunError, match=message), told_if_too_large("a step"):
        raise error
    bug = jax.errors.JaxRuntimeError("INTERNAL: a bug")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), told_if_too_large("a step"):
        raise bug
