"""A layer is a layer, a shard is a shard, and mistakes are named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.errors import ConfigError
from jaxdist.hlo import ledger
from jaxdist.optim.lamb import LambState, lamb
from jaxdist.optim.lars import LarsState, lars
from jaxdist.optim.layers import layer_dims
from jaxdist.optim.trust_ratio import scale_by_layerwise_trust_ratio

DIMS = {
    "blocks/kernel": ("layers", "embed", "mlp"),
    "blocks/scale": ("layers", "embed"),
    "head": ("embed", "vocab"),
}


def tree(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    sizes = np.array([1e-2, 1.0, 30.0, 1e3]).reshape(4, 1, 1)
    found = {
        "blocks": {"kernel": rng.normal(size=(4, 8, 16)) * sizes, "scale": rng.normal(size=(4, 8))},
        "head": rng.normal(size=(8, 24)),
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), found)


def unstacked(stacked):
    return {
        "layers": [jax.tree.map(lambda x, i=i: x[i], stacked["blocks"]) for i in range(4)],
        "head": stacked["head"],
    }


TRANSFORMS = {
    "lamb": lambda **k: lamb(0.1, **k),
    "lamb clipped": lambda **k: lamb(0.1, variant="apex", **k),
    "lars": lambda **k: lars(0.1, **k),
    "lars timm": lambda **k: lars(0.1, variant="timm", **k),
    "grafted": lambda **k: optax.chain(
        optax.scale_by_rms(), scale_by_layerwise_trust_ratio(eps=1.0, **k)
    ),
}
each_transform = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)


def steps(transform, params, grads):
    state = transform.init(params)
    for g in grads:
        updates, state = transform.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(found, expected, rtol=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max()))


@each_transform
@pytest.mark.every(3)
def test_stacked_layers_move_as_if_each_were_a_leaf(make):
    params, grads = tree(0), [tree(1), tree(2)]
    found = steps(make(layer_dims=NAMES), params, grads)
    alone = steps(make(), unstacked(params), [unstacked(g) for g in grads])
    assert_close(unstacked(found), alone)
    one_norm = steps(make(), params, grads)
    assert float(jnp.abs(one_norm["blocks"]["kernel"] - found["blocks"]["kernel"]).max()) > 1e-3


def test_layer_dims_come_from_logical_dims():
    found = layer_dims(tree(0), DIMS)
    assert found == {**NAMES, "head": (None, None)}
    found = layer_dims(tree(0), DIMS, ("layers", "mlp"))
    assert found["blocks"] == {"kernel": ("layers", None, "mlp"), "scale": ("layers", None)}


def test_one_norm_for_each_head():
    w, g = jnp.ones((4, 3, 2)) * jnp.arange(1.0, 4).reshape(1, 3, 1), jnp.ones((4, 3, 2))
    graft = scale_by_layerwise_trust_ratio(layer_dims=[[None, "heads", None]])
    found, _ = graft.update([g], graft.init([w]), [w])
    np.testing.assert_allclose(found[0], w, rtol=1e-6)


SPECS = {"blocks": {"kernel": P(None, None, "data"), "scale": P()}, "head": P("data", "tensor")}
STAGES = {"blocks": {"kernel": P("data", "tensor"), "scale": P("data")}, "head": P("data")}
NAMES = {"blocks": {"kernel": ("layers", None, None), "scale": ("layers", None)}, "head": None}


def mesh_of(devices):
    return jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices)


def sharded_step(transform, mesh, specs, params):
    """A jitted update inside `shard_map`, and its state's specs."""
    shapes = jax.eval_shape(transform.init, params)
    state_specs = optax.tree.map_params(
        transform, lambda _, s: s, shapes, specs, transform_non_params=lambda _: P()
    )
    return jax.jit(
        jax.shard_map(
            transform.update,
            mesh=mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
        )
    )


@pytest.mark.parametrize("specs", [SPECS, STAGES], ids=["shards", "stages"])
@each_transform
@pytest.mark.every(3)
def test_shards_move_as_the_whole_does(make, specs, devices):
    params, grads = tree(0), [tree(1), tree(2)]
    transform = make(layer_dims=NAMES, specs=specs)
    step = sharded_step(transform, mesh_of(devices), specs, params)
    state, found = transform.init(params), params
    for g in grads:
        updates, state = step(g, state, found)
        found = optax.apply_updates(found, updates)
    assert_close(found, steps(make(layer_dims=NAMES), params, grads))


@pytest.mark.parametrize(("make", "calls"), [(TRANSFORMS["lamb"], 1), (TRANSFORMS["lars"], 1)])
@pytest.mark.parametrize(("specs", "layers"), [(SPECS, 5), (STAGES, 5)])
def test_all_norms_of_the_tree_travel_in_one_all_reduce(make, calls, specs, layers, devices):
    params, mesh = tree(0), mesh_of(devices)
    transform = make(layer_dims=NAMES, specs=specs)
    step = sharded_step(transform, mesh, specs, params)
    compiled = step.lower(params, transform.init(params), params).compile()
    sent = ledger(compiled, mesh).collectives
    assert len(sent) == calls
    text = compiled.as_text()
    assert f"f32[{2 * layers}]" in next(x for x in text.splitlines() if " all-reduce(" in x)


@each_transform
@pytest.mark.every(3)
def test_auto_axes_are_exact(make, devices):
    params, grads = tree(0), [tree(1), tree(2)]
    mesh = mesh_of(devices)
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, SPECS)
    transform = make(layer_dims=NAMES, specs=SPECS)
    assert_close(
        jax.jit(lambda p: steps(transform, p, grads))(placed),
        steps(make(layer_dims=NAMES), params, grads),
    )


def test_a_zero_norm_gives_ratio_one():
    w = {"zero": jnp.zeros((2, 2)), "some": jnp.ones((2, 2))}
    g = {"zero": jnp.ones((2, 2)), "some": jnp.zeros((2, 2))}
    graft = scale_by_layerwise_trust_ratio(ratio_bounds=(0.0, 0.5))
    found, _ = graft.update(g, graft.init(w), w)
    assert_close(found, g)


@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
@each_transform
def test_extreme_weights_never_make_nan(make, size):
    w = [jnp.full((2, 2), size, jnp.float32)]
    found = steps(make(), w, [[jnp.ones((2, 2))]])
    assert np.isfinite(found[0]).all()


def test_a_nan_gradient_stays_visible():
    w, g = [jnp.ones((2, 2))], [jnp.full((2, 2), jnp.nan)]
    for make in TRANSFORMS.values():
        assert np.isnan(steps(make(), w, [g])[0]).all()


@each_transform
def test_empty_trees_and_scalars(make):
    assert steps(make(), {}, [{}]) == {}
    found = steps(make(), jnp.float32(2), [jnp.float32(1)])
    assert (found.shape == () and found < 2) or make is TRANSFORMS["grafted"]


@each_transform
@pytest.mark.every(3)
def test_bf16_parameters_have_float32_moments(make):
    params, grads = tree(0, jnp.bfloat16), [tree(1, jnp.bfloat16)]
    transform = make(layer_dims=NAMES)
    updates, state = transform.update(grads[0], transform.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    if isinstance(state, LambState | LarsState):
        moments = {x.dtype for x in jax.tree.leaves(state) if x.ndim}
        assert moments == {jnp.dtype("float32")}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads[0]))
    exact, _ = transform.update(wide[1], transform.init(wide[0]), wide[0])
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), updates), exact, rtol=1e-2)


def test_masks_choose_by_dims_besides_the_layers():
    params, g = tree(0), tree(1)
    transform = lars(1.0, weight_decay=0.5, layer_dims=NAMES)
    updates, _ = transform.update(g, transform.init(params), params)
    np.testing.assert_array_equal(updates["blocks"]["scale"], -g["blocks"]["scale"])
    chosen = lars(1.0, adapt_mask={"blocks": True, "head": False}, decay_mask=False)
    updates, _ = chosen.update(g, chosen.init(params), params)
    np.testing.assert_array_equal(updates["head"], -g["head"])


def update(transform, params=None):
    params = tree(0) if params is None else params
    transform.update(params, transform.init(params), params)


@pytest.mark.parametrize("make", [lambda **k: lamb(0.1, **k), lambda **k: lars(0.1, **k)])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layer_dims": {**NAMES, "head": ["layers", None, None]}},
            r"head \(8, 24\): \['layers', None, None\] names 3 dims, but the parameter has 2; name",
        ),
        (
            {"layer_dims": {**NAMES, "head": 1}},
            r"head \(8, 24\): 1 names no dims; .*as \('layers', N",
        ),
        ({"layer_dims": {**NAMES, "head": [0]}}, r"head \(8, 24\): \[0\] names no dims"),
        ({"layer_dims": {**NAMES, "head": "layers"}}, r"head \(8, 24\): 'layers' names no dims"),
        (
            {"layer_dims": {"head": None}},
            "layer_dims must be a tree with the structure of the param",
        ),
        ({"specs": {"head": P()}}, "specs must be a tree with the structure of the param"),
        ({"decay_mask": lambda p: jax.tree.map(lambda _: False, p)}, "decay_mask matches none of"),
        ({"adapt_mask": {"nothing": True}}, "adapt_mask does not fit the parameters"),
        (
            {"specs": {"blocks": {"kernel": P(), "scale": P()}, "head": P(None, None, "data")}},
            r"head \(8, 24\).*3 entries for 2 dims",
        ),
    ],
)
def test_trees_that_do_not_fit(make, settings, message):
    with pytest.raises(ConfigError, match=message):
        update(make(**settings))


def test_an_axis_that_the_mesh_does_not_have(devices):
    specs = {**SPECS, "head": P("dataz")}
    transform = lamb(0.1, specs=specs)
    step = sharded_step(transform, mesh_of(devices), SPECS, tree(0))
    with pytest.raises(ConfigError, match=r"'dataz', which is not an axis .* mean 'data'"):
        step(tree(0), transform.init(tree(0)), tree(0))


def test_a_dim_that_no_parameter_has():
    with pytest.raises(ConfigError, match="no parameter has a dim 'layer': did you mean 'layers'"):
        layer_dims(tree(0), DIMS, ("layer",))


@each_transform
def test_missing_params(make):
    transform = make()
    with pytest.raises(ConfigError, match=r"update\(grads, state, params\)"):
        transform.update(tree(0), transform.init(tree(0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lamb(-0.1), "learning_rate = -0.1"),
        (lambda: lamb(0.1, weight_decay=float("nan")), "weight_decay = nan"),
        (lambda: lamb(0.1, b1=1.0), "b1 = 1.0: must be at least 0 and less than 1"),
        (lambda: lamb(0.1, variant="aplex"), "variant 'aplex': did you mean 'apex'"),
        (lambda: lamb(0.1, ratio_bound=1), "no option 'ratio_bound': did you mean 'ratio_bounds'"),
        (lambda: lamb(0.1, phi=(2.0, 1.0)), r"phi = \(2.0, 1.0\): need 0 <= lower <= upper"),
        (lambda: lamb(0.1, max_grad_norm=0.0), "max_grad_norm = 0.0: must be above 0"),
        (lambda: lars(0.1, trust_coefficient=-1), "trust_coefficient = -1"),
        (lambda: lars(0.1, momentum=-0.5), "momentum = -0.5"),
        (lambda: lars(0.1, variant="deepspeed"), "variant 'deepspeed': allowed: paper"),
        (lambda: scale_by_layerwise_trust_ratio(eps=float("inf")), "eps = inf"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
