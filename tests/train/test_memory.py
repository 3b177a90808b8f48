import jax
import jax.numpy as jnp
import pytest

from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.sharding import ShardingConfig, make_layout
from jaxdist.train.memory import bytes_per_device, check_state_fits
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
