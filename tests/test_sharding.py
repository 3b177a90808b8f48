import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
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
    with pytest.raises(ShardingError) as refused:
        resolve_dims(ShardingConfig(), SHAPES, {**DIMS, "head": None})
    assert "1 parameter names no dims" in str(refused.value)
    assert '"head": [null, null]  # [16, 10]' in str(refused.value)


def resolved(params, shapes=SHAPES, dims=None, stacked=()):
    """Dims of parameters of which the model names none, or those given."""
    config = ShardingConfig.model_validate({"params": params})
    return resolve_dims(config, shapes, dims or dict.fromkeys(shapes), frozenset(stacked))


def test_patterns_annotate():
    assert resolved({"he*": ["mlp", None]}, dims={**DIMS, "head": None})["head"] == ("mlp", None)


KERNELS = {"conv/kernel": (3, 3, 8, 16), "query/kernel": (8, 2, 4), "b": (4,), "scale": ()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("whole", {name: (None,) * len(shape) for name, shape in KERNELS.items()}),
        (["...", "mlp"], {"conv/kernel": (None, None, None, "mlp"),
                          "query/kernel": (None, None, "mlp"), "b": ("mlp",)}),
        (["embed", "...", "mlp"], {"conv/kernel": ("embed", None, None, "mlp"),
                                   "query/kernel": ("embed", None, "mlp")}),
        (["embed", "..."], {"query/kernel": ("embed", None, None), "b": ("embed",)}),
    ],
)  # fmt: skip
def test_a_pattern_for_any_rank(given, expected):
    found = resolved({"*": given}, {name: KERNELS[name] for name in expected})
    assert found == expected


def test_dims_that_are_too_many_for_an_ellipsis():
    found = resolved({"b": ["embed", "...", "mlp"]}, {"b": (4,)})
    with pytest.raises(ShardingError, match=r"b \(4,\) has 1 dims, but 2 are named"):
        shardings(layout(), {"b": (4,)}, found)


def test_the_first_pattern_that_matches_wins():
    found = resolved({"*/kernel": ["embed", "mlp"], "head": ["mlp", None], "*": "whole"})
    assert found == {"mlp/kernel": ("embed", "mlp"), "head": ("mlp", None)}


def test_a_pattern_behind_one_that_takes_all_it_matches_says_so():
    with pytest.raises(
        ShardingError, match=r"'he\*' has no effect: '\*' before it .* put 'he\*' first"
    ):
        resolved({"*": "whole", "he*": ["mlp", None]})


def test_patterns_leave_what_the_model_names():
    assert resolved({"*": "whole"}, dims={**DIMS, "head": None}) == {
        "mlp/kernel": ("embed", "mlp"),
        "head": (None, None),
    }
    with pytest.raises(
        ShardingError, match=r"'head' matches only .* whose dims the model names .*head"
    ):
        resolved({"head": "whole"}, dims=DIMS)


@pytest.mark.parametrize("given", [["mlp", "..."], ["layers", "mlp", None], ["mlp", None]])
def test_of_stacked_layers_a_pattern_names_the_dims_of_one(given):
    found = resolved({"*": given}, {"blocks/kernel": (6, 8, 16)}, stacked=["blocks/kernel"])
    assert found == {"blocks/kernel": ("layers", "mlp", None)}


def test_dims_of_one_layer_that_the_model_names():
    """As `nnx.vmap` leaves them; those that name all of the stack's stay."""
    shapes = {"blocks/kernel": (6, 8, 16), "blocks/bias": (6, 16)}
    dims = {"blocks/kernel": ("embed", "mlp"), "blocks/bias": ("layers", "mlp")}
    found = resolved({}, shapes, dims, stacked=shapes)
    assert found == {"blocks/kernel": ("layers", "embed", "mlp"), "blocks/bias": ("layers", "mlp")}


@pytest.mark.parametrize("given", ["hole", ["...", "mlp", "..."], 3, [1]])
def test_what_names_no_dims(given):
    with pytest.raises(ValidationError):
        resolved({"*": given})


DEEP = {
    f"blocks/{i}/{name}": shape
    for i in range(12)
    for name, shape in {
        "attention/out/kernel": (2, 4, 8),
        "attention/out/bias": (8,),
        "kernel": (8, 8),
        "taps/0": (3,),
        "taps/1": (3,),
        "scale": (),
    }.items()
} | {"embed/kernel": (100, 8), "blocks/12/kernel": (8, 9, 9), "odd [x]": (5,)}


def test_parameters_without_dims_are_told_by_pattern_with_a_block_to_paste():
    with pytest.raises(ShardingError) as refused:
        resolved({"nothing/*": "whole"}, DEEP)
    text = str(refused.value)
    assert "63 parameters name no dims" in text
    assert '"blocks/*/attention/out/kernel": [null, null, null]  # [2, 4, 8], 12 param' in text
    assert max(map(len, text.splitlines())) <= 200
    assert len(text.splitlines()) < 20
    assert "pattern 'nothing/*' matches no parameter" in text
    block = text[text.index("sharding:") :].split("\n\n")[0]
    pasted = yaml.safe_load(block)["sharding"]["params"]
    found = resolved(pasted, DEEP)
    assert found == {name: (None,) * len(shape) for name, shape in DEEP.items()}


def test_a_misspelt_pattern_among_many_parameters_names_the_nearest_alone():
    with pytest.raises(ShardingError, match=r"did you mean 'embed/kernel'\?$"):
        resolved({"embd/kernel": "whole", "*": "whole"}, DEEP)


def test_many_parameters_that_cannot_be_laid_out_are_told_once():
    shapes = {f"blocks/{i}/kernel": (8, 18) for i in range(70)} | {"head": (8, 10)}
    with pytest.raises(ShardingError) as refused:
        shardings(layout(), shapes, dict.fromkeys(shapes, ("embed", "mlp")))
    first, second = str(refused.value).splitlines()
    assert first.startswith("parameter blocks/*/kernel (8, 18), 70 of them: dim 'mlp' of length 18")
    assert second.startswith("parameter head (8, 10): dim 'mlp' of length 10")


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
