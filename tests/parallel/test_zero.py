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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_dim_is_never_split_twice(stage, devices):
    """Not even where no other divides: another is filled up, or the tensor stays whole."""
    rules = {"embed": "tensor", "mlp": None, "vocab": None}
    found = specs({"data": 2, "tensor": 4}, rules=rules, whole_below=0, stage=stage)
    assert found["embedding"] == P("data", "tensor")
    assert found["blocks"]["scale"] == P(None, "tensor")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layers_are_never_split(stage, devices):
    """Each device holds a part of every layer, though here no other dim divides."""
    assert specs({"data": 8}, whole_below=0, stage=stage)["blocks"]["bias"] == P(None, "data")
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))
    params = {"bias": jax.ShapeDtypeStruct((8, 3), jnp.float32)}
    config = ZeroConfig(stage=stage, whole_below=0)
    found = plan_zero(config, layout, params, {"bias": ("layers", None)})
    assert found.dims == {"bias": None}
    assert found.uneven == {"bias": (8, 3)}


def plan(mesh, **zero):
    layout = make_layout(ShardingConfig(rules={"vocab": None}), build_mesh(mesh))
    return plan_zero(ZeroConfig(whole_below=0, **zero), layout, PARAMS, DIMS)


def test_where_no_dim_divides_one_is_filled_up(devices):
    found = plan(MeshConfig(data=8), stage=1)
    # 15 to 16 rather than 7 to 8; the 33 of the embedding may stay, since its 16 divides.
    assert found.padded == {"odd": (15, 16), "blocks/bias": (15, 16)}
    assert found.dims["odd"] == 0
    assert not found.uneven


def test_only_stage_1_gives_a_device_whole_layers(devices):
    """Muon then needs no exchange; the other stages send each layer's gradients by themselves."""
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))
    params = {n: jax.ShapeDtypeStruct((n, 8, 8), jnp.float32) for n in (8, 6)}
    dims = {str(n): ("layers", "embed", "mlp") for n in params}
    for stage in (1, 2, 3):
        config = ZeroConfig(stage=stage, whole_below=0)
        zero = plan_zero(config, layout, params, dims, by_layer=True)
        assert zero.dims == {"8": 0 if stage == 1 else 1, "6": 1}


def test_a_scalar_has_no_layers(devices):
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))
    params = {"gain": jax.ShapeDtypeStruct((), jnp.float32)}
    config = ZeroConfig(stage=1, whole_below=0)
    zero = plan_zero(config, layout, params, {"gain": ()}, by_layer=True)
    assert zero.dims == {"gain": None}


def test_a_dim_is_filled_up_to_twice_its_length_at_most(devices):
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))

    def found(*shape):
        params, dims = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}, {"w": (None,) * len(shape)}
        zero = plan_zero(ZeroConfig(stage=1, whole_below=2), layout, params, dims)
        return dict(zero.padded), dict(zero.uneven)

    assert found(4, 3) == ({"w": (4, 8)}, {})
    assert found(3, 3) == ({}, {"w": (3, 3)})
    assert found(1) == ({}, {})


def test_a_dim_that_another_axis_splits_is_not_filled_up(devices):
    params = {"w": jax.ShapeDtypeStruct((5, 14), jnp.float32)}
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=4, tensor=2)))
    zero = plan_zero(ZeroConfig(stage=1, whole_below=0), layout, params, {"w": ("embed", "mlp")})
    assert zero.padded == {"w": (5, 8)}
    assert zero.dims == {"w": 0}


def test_the_fast_network_alone(devices):
    found = specs({"data": {"dcn": 2, "ici": 4}}, stage=1, scope="ici")
    assert found["blocks"]["kernel"] == P(None, None, "data_ici")
    everywhere = specs({"data": {"dcn": 2, "ici": 4}}, stage=1)
    assert everywhere["blocks"]["kernel"] == P(None, None, ("data_dcn", "data_ici"))


def test_stage_0_splits_nothing(devices):
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig(data=8)))
    found = plan_zero(ZeroConfig(), layout, PARAMS, DIMS)
    assert (found.stage, found.axes, {*found.dims.values()}) == (0, (), {None})


@pytest.mark.parametrize(
    ("mesh", "rules", "zero", "message"),
    [
        (
            {"tensor": 8},
            None,
            {"stage": 2},
            r"zero.stage 2 .* mesh \{'tensor': 8\} has no such axis",
        ),
        ({"data": 8}, None, {"stage": 1, "scope": "ici"}, r"scope: ici .* \{'data': 8\}"),
        ({"data": 8}, {"embed": "data"}, {"stage": 3}, r"blocks/kernel \(8, 16, 48\).*over data"),
    ],
)
def test_what_cannot_be_split(devices, mesh, rules, zero, message):
    with pytest.raises(ConfigError, match=message):
        specs(mesh, rules=rules, **zero)
