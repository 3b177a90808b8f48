import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from pydantic import ValidationError

from jaxdist.errors import ShardingError
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.sharding import ShardingConfig, make_layout, param_shardings, resolve_dims


def layout(mesh=None, **rules):
    mesh = build_mesh(MeshConfig.model_validate(mesh or {"data": 2, "tensor": 4}))
    return make_layout(ShardingConfig(rules=rules), mesh)


SHAPES = {"mlp/kernel": (8, 16), "head": (16, 10)}
DIMS = {"mlp/kernel": ("embed", "mlp"), "head": ("mlp", "classes")}


def shardings(found, shapes=SHAPES, dims=DIMS):
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return param_shardings(found, tree, dims)


def test_dims_become_axes():
    found = shardings(layout())
    assert found["mlp/kernel"].spec == P(None, "tensor")
    assert found["head"].spec == P("tensor", None)


def test_an_axis_that_the_mesh_lacks_splits_nothing():
    assert shardings(layout({"data": 8}))["mlp/kernel"].spec == P(None, None)


def test_a_split_axis_uses_both_networks():
    found = layout({"data": {"dcn": 2, "ici": 4}})
    assert found.spec(("batch", None)) == P(("data_dcn", "data_ici"), None)
    assert found.data_size == 8


def test_rules_of_the_config_win():
    assert shardings(layout(mlp=None, embed="tensor"))["mlp/kernel"].spec == P("tensor", None)


def test_a_dim_that_does_not_divide_says_so_with_numbers_and_remedy():
    with pytest.raises(ShardingError) as caught:
        shardings(layout(), {"w": (8, 18)}, {"w": ("embed", "mlp")})
    message = str(caught.value)
    assert "parameter w (8, 18)" in message
    assert "'mlp' of length 18 does not divide over mesh axis 'tensor' of size 4" in message
    assert "remainder 2" in message
    assert "sharding.rules.mlp: null" in message


def test_two_dims_on_one_axis():
    with pytest.raises(ShardingError, match=r"dims 'mlp' and 'heads' are both mapped .*'tensor'"):
        shardings(layout(), {"w": (8, 8)}, {"w": ("mlp", "heads")})


def test_a_dim_without_a_rule_names_the_nearest():
    with pytest.raises(ShardingError, match=r"parameter w \(8,\).*'embd'.*did you mean 'embed'"):
        shardings(layout(), {"w": (8,)}, {"w": ("embd",)})


def test_wrong_number_of_dims():
    with pytest.raises(ShardingError, match=r"w \(8, 8\) has 2 dims, but 1 are named"):
        shardings(layout(), {"w": (8, 8)}, {"w": ("embed",)})


def test_all_problems_are_reported_together():
    with pytest.raises(ShardingError) as caught:
        shardings(layout(), {"a": (3, 3), "b": (5,)}, {"a": ("embed", "mlp"), "b": ("mlp",)})
    assert "parameter a" in str(caught.value)
    assert "parameter b" in str(caught.value)


def test_unannotated_parameters_are_an_error_with_the_remedy():
    with pytest.raises(ShardingError, match=r"head \(16, 10\) names no dims.*sharding.params"):
        resolve_dims(ShardingConfig(), SHAPES, {**DIMS, "head": None})


def test_patterns_annotate():
    config = ShardingConfig(params={"he*": ["mlp", None]})
    assert resolve_dims(config, SHAPES, {**DIMS, "head": None})["head"] == ("mlp", None)


def test_an_unused_pattern_names_the_nearest_parameter():
    with pytest.raises(ShardingError, match=r"'haed' matches no parameter: did you mean 'head'"):
        resolve_dims(ShardingConfig(params={"haed": [None, None]}), SHAPES, DIMS)


def test_an_unused_rule_names_the_nearest_dim():
    with pytest.raises(ShardingError, match=r"sharding.rules.mpl: .* did you mean 'mlp'"):
        resolve_dims(ShardingConfig(rules={"mpl": "tensor"}), SHAPES, DIMS)


def test_a_rule_onto_an_unknown_axis():
    with pytest.raises(ValidationError, match="did you mean 'tensor'"):
        ShardingConfig(rules={"mlp": "tensr"})


def test_constraint_inside_jit():
    found = layout()
    x = jax.jit(lambda x: found(x, "batch", "mlp"))(np.ones((4, 8), np.float32))
    assert x.sharding.spec == P("data", "tensor")


@pytest.mark.parametrize(
    ("manual", "expected"),
    [
        ({"data_dcn", "data_ici"}, '[{}, {"tensor"}]'),
        ({"data_ici"}, '[{"data_dcn"}, {"tensor"}]'),
    ],
)
def test_a_hint_inside_shard_map_leaves_out_the_manual_axes(manual, expected):
    found = layout({"data": {"dcn": 2, "ici": 2}, "tensor": 2})
    spec = P(tuple(sorted(manual)))
    run = jax.shard_map(
        lambda x: found(x, "batch", "mlp"),
        mesh=found.mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=manual,
        check_vma=False,
    )
    x = jnp.arange(32.0).reshape(8, 4)
    np.testing.assert_array_equal(jax.jit(run)(x), x)
    assert f"<@mesh, {expected}>" in jax.jit(run).lower(x).as_text()


def test_a_hint_with_manual_axes_alone_constrains_nothing():
    found = layout({"data": 8})
    run = jax.shard_map(
        lambda x: found(x, "batch", "mlp"), mesh=found.mesh, in_specs=P("data"), out_specs=P("data")
    )
    text = jax.jit(run).lower(jnp.zeros((8, 4))).as_text()
    assert "sharding_constraint" not in text


def test_in_a_hint_an_axis_splits_the_first_dim_that_it_is_mapped_to():
    found = layout({"data": 8}, embed="data")
    y = jax.jit(lambda x: found(x, "batch", None, "embed"))(jnp.zeros((8, 2, 16)))
    assert y.sharding.spec == P("data")
    y = jax.jit(lambda x: found(x, None, "embed"))(jnp.zeros((2, 16)))
    assert y.sharding.spec == P(None, "data")
