"""Which dim of each tensor ZeRO splits, from shapes alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.parallel.zero import ZeroConfig, plan_zero
from jaxdist.sharding import ShardingConfig, make_layout, param_shardings

DIMS = {
    "blocks/kernel": ("layers", "embed", "mlp"),
    "blocks/scale": ("layers", "embed"),
    "embedding": ("vocab", "embed"),
    "odd": (None, None),
    "blocks/bias": ("layers", None),
}
SHAPES = {
    "blocks": {"kernel": (8, 16, 48), "scale": (8, 16), "bias": (8, 15)},
    "embedding": (33, 16),
    "odd": (15, 7),
}
PARAMS = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)


def specs(mesh, *, rules=None, **zero):
    layout = make_layout(
        ShardingConfig(rules=rules or {"vocab": None}), build_mesh(MeshConfig.model_validate(mesh))
    )
    plan = plan_zero(ZeroConfig.model_validate(zero), layout, PARAMS, DIMS)
    assert plan is not None
    split = plan.shardings(param_shardings(layout, PARAMS, DIMS))
    return jax.tree.map(lambda sharding: sharding.spec, split)


def test_the_longest_dim_that_divides_is_split_and_small_tensors_stay_whole(devices):
    found = specs({"data": 8}, stage=1, whole_below=128)
    assert found["blocks"]["kernel"] == P(None, None, "data")
    assert found["blocks"]["scale"] == P(None, "data")
    assert found["embedding"] == P(None, "data")
    assert found["odd"] == P(None, None)
    assert specs({"data": 8}, stage=1, whole_below=129)["blocks"]["scale"] == P(None, None)


def test_a_dim_that_tensor_parallelism_left_whole_comes_first(devices):
    found = specs({"data": 4, "tensor": 2}, stage=3)["blocks"]["kernel"]
    assert found == P(None, "data", "tensor")


def test_a_dim_is_split_twice_where_no_other_divides(devices):
    found = specs(
        {"data": 2, "tensor": 4},
        rules={"embed": "tensor", "mlp": None, "vocab": None},
        whole_below=0,
        stage=2,
    )
    assert found["embedding"] == P(None, ("tensor", "data"))


def test_layers_are_split_only_where_nothing_else_divides(devices):
    blocks = specs({"data": 8}, whole_below=0, stage=1)["blocks"]
    assert blocks["bias"] == P("data", None)
    assert blocks["scale"] == P(None, "data")


def test_the_fast_network_alone(devices):
    found = specs({"data": {"dcn": 2, "ici": 4}}, stage=1, scope="ici")
    assert found["blocks"]["kernel"] == P(None, None, "data_ici")
    everywhere = specs({"data": {"dcn": 2, "ici": 4}}, stage=1)
    assert everywhere["blocks"]["kernel"] == P(None, None, ("data_dcn", "data_ici"))


def test_stage_0_is_no_plan(devices):
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))
    assert plan_zero(ZeroConfig(), layout, PARAMS, DIMS) is None


@pytest.mark.parametrize(
    ("mesh", "rules", "zero", "message"),
    [
        ({"tensor": 8}, None, {"stage": 2}, r"zero.stage 2 .* mesh \{'tensor': 8\} has none"),
        ({"data": 8}, None, {"stage": 1, "scope": "ici"}, r"scope: ici .* \{'data': 8\}"),
        ({"data": 8}, {"embed": "data"}, {"stage": 3}, r"blocks/kernel \(8, 16, 48\).*over data"),
    ],
)
def test_what_cannot_be_split(devices, mesh, rules, zero, message):
    with pytest.raises(ConfigError, match=message):
        specs(mesh, rules=rules, **zero)
