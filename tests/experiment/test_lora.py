"""Low-rank adapters: the numbers of their definition, their state, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_part import built, names, trained_a_step

from jaxdist.errors import ConfigError
from jaxdist.models.functional import functional
from jaxdist.models.tuning.lora import adapter_of, merge
from jaxdist.models.tuning.part import LoraConfig
from jaxdist.trees import flatten_with_names, tree_bytes, tree_size

LORA = {"rank": 2, "alpha": 8.0, "targets": ["blocks/attention/*"]}


def config_of(**settings: object) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, "alpha": 8.0, "targets": ("*",), **settings})


class TwoLayers(nnx.Module):
    """A stack of two dense layers that jaxdist did not make."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
        self.blocks = make(jax.random.split(rngs.params(), 2))
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in range(2):
            x = jnp.tanh(x @ self.blocks.kernel[...][layer] + self.blocks.bias[...][layer][None])
        return self.last(x)


@pytest.mark.full
def test_a_kernel_computes_as_with_its_product_added():
    model = functional(TwoLayers)
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(model.params)}
    dims = {name: (None,) * len(shape) for name, shape in shapes.items()}
    dims["blocks/kernel"] = ("layers", None, None)
    dims["blocks/bias"] = ("layers", None)
    model = model.with_dims(dims)
    given = [(name, shapes[name], dims[name]) for name in shapes]
    made = [adapter_of(config_of(), *one, stacked=one[0] in model.stacked) for one in given]
    adapted = model.adapted([adapter for adapter in made if adapter])
    assert {adapter.name for adapter in adapted.adapters} == {"blocks/kernel", "last/kernel"}
    own, _ = adapted.init(jax.random.key(1))
    plain, _ = model.init(jax.random.key(1))
    own["lora"] = jax.tree.map(lambda x: x + 0.1, own["lora"])  # B begins at zero.
    x = jax.random.normal(jax.random.key(2), (5, 4))
    a, b = (own["lora"]["blocks"]["kernel"][part] for part in "ab")
    plain["blocks"]["kernel"] += 8 / 2 * jnp.einsum("lir,lro->lio", a, b)
    a, b = (own["lora"]["last"]["kernel"][part] for part in "ab")
    plain["last"]["kernel"] += 8 / 2 * a @ b
    found, expected = adapted.bind(own, {})(x), model.bind(plain, {})(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    merged = merge(adapted.adapters, dict(flatten_with_names(own)))
    for name, leaf in flatten_with_names(plain):
        np.testing.assert_allclose(merged[name], leaf, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 4.0), (True, 8 / 2**0.5)])
def test_the_scale(rslora, scale):
    assert config_of(rslora=rslora).scale == scale


def test_dropout_leaves_out_whole_features_and_keeps_the_mean():
    adapter = adapter_of(config_of(dropout=0.5), "w", (8, 6), (None, None), stacked=False)
    assert adapter is not None
    model = functional(lambda rngs: nnx.Linear(8, 6, use_bias=False, rngs=rngs))
    model = model.with_dims({"kernel": (None, None)})
    one = adapter_of(config_of(dropout=0.5), "kernel", (8, 6), (None, None), stacked=False)
    assert one is not None
    model = model.adapted([one])
    params, _ = model.init(jax.random.key(0))
    params["kernel"] = jnp.zeros((8, 6))
    params["lora"]["kernel"]["b"] = jnp.ones((2, 6))
    eye, delta = jnp.eye(8), 4 * params["lora"]["kernel"]["a"] @ jnp.ones((2, 6))
    rows = [model.bind(params, {}, jax.random.key(i))(eye) for i in range(20)]
    kept = np.array([np.abs(one).sum(1) > 0 for one in rows])
    assert 0.3 < kept.mean() < 0.7
    for one, mask in zip(rows, kept, strict=True):
        np.testing.assert_allclose(one, 2 * delta * mask[:, None], rtol=1e-6)
    np.testing.assert_allclose(model.bind(params, {})(eye), delta, rtol=1e-6)


@pytest.mark.full
def test_dropout_does_not_depend_on_the_order_of_positions():
    """A mask is that of a layer's features, so that devices that share sequences draw alike."""

    def loss(**sections):
        experiment = built({"lora": {**LORA, "dropout": 0.5}}, **sections)
        program = experiment.program
        state, metrics = program.init(), None
        with experiment.loader.batches() as batches:
            for _ in range(3):  # B begins at zero, so that the first step shows no mask.
                state, metrics = program.train(state, next(batches))
        return float(metrics[0])

    split = {"context": "ring", "context_order": "zigzag"}
    given = {"mesh": {"context": 2}, "sharding": split}
    np.testing.assert_allclose(loss(**given), loss(mesh={"data": 1}), rtol=1e-6)


@pytest.mark.full
def test_adapters_alone_are_trained_with_eight_bytes_of_state_each():
    lora = {**LORA, "targets": ["blocks/*", "embedding"]}
    mesh, parallel = {"data": 2}, {"zero": {"stage": 3, "whole_below": 0}}
    experiment = built({"lora": lora}, mesh=mesh, parallel={**parallel, "reduce": {"type": "xla"}})
    program = experiment.program
    trained = names(program.model.trained)
    assert all(name.startswith("lora/") for name in trained)
    assert len(trained) == 2 * 8
    state = program.own_shapes
    counts = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    size = tree_size(program.model.trained)
    assert tree_bytes(state.opt_state) == 8 * size + tree_bytes(counts)
    before, after = trained_a_step(experiment)
    pairs = zip(flatten_with_names(before.params), jax.tree.leaves(after.params), strict=True)
    moved = {name for (name, old), new in pairs if not np.array_equal(old, new)}
    # B begins at zero, so that A has no gradient in the first step, and AdamW decays matrices.
    assert moved == trained


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["blocks/attention/querry"], "did you mean 'blocks/attention/query'?"),
        (["norm/scale"], "'norm/scale' matches no kernel: norm/scale [32]"),
    ],
)
def test_targets_without_a_kernel_are_refused(targets, said):
    with pytest.raises(ConfigError) as refused:
        built({"lora": {**LORA, "targets": targets}})
    assert said in str(refused.value)


def test_freeze_beside_adapters_is_refused():
    with pytest.raises(ConfigError, match="freeze has no effect with lora"):
        built({"lora": LORA, "freeze": ["embedding"]})
