"""ResNets beside the published sizes, and under plans that must not change their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initialized import initialized
from pydantic import ValidationError

from jaxdist.models.functional import functional
from jaxdist.models.images.resnet import ResnetConfig
from jaxdist.trees import tree_size


def resnet(shape=(32, 32, 3), classes=10, **settings):
    config = ResnetConfig.model_validate({"type": "resnet", **settings})
    return functional(lambda rngs: config.build(rngs, shape=shape, classes=classes))


@pytest.mark.parametrize(
    ("settings", "classes", "params", "statistics"),
    [
        # torchvision's counts; statistics are a mean and a variance of each normalised channel.
        ({"depth": 18}, 1000, 11_689_512, 2 * 4_800),
        ({"depth": 34}, 1000, 21_797_672, 2 * 8_512),
        ({"depth": 50}, 1000, 25_557_032, 2 * 26_560),
        ({"depth": 50, "norm": "group"}, 1000, 25_557_032, 0),
        # The paper's ResNet-20 has 0.27 M parameters, without projections of its shortcuts.
        ({"blocks": [3, 3, 3], "width": 16, "stem": "cifar"}, 10, 272_474, 2 * 784),
    ],
)
@pytest.mark.every(3)
def test_sizes_are_the_published_ones(settings, classes, params, statistics):
    model = resnet((224, 224, 3), classes, **settings)
    assert (tree_size(model.params), tree_size(model.buffers)) == (params, statistics)
    assert all(dims and None not in dims for dims in model.dims.values())


@pytest.mark.full
def test_version_1_5_has_the_stride_in_the_window_of_3_and_quarters_the_image_first():
    model = resnet((64, 64, 3), 10, blocks=[1, 1], width=4, bottleneck=True)
    shapes = []

    def run(params, buffers, x):
        module = model.bind(params, buffers)
        second = module.blocks[1]
        assert [c.strides for c in second.convolutions] == [(1, 1), (2, 2), (1, 1)]
        for part in module.parts():
            shapes.append((x := part(x)).shape)

    jax.eval_shape(run, model.params, model.buffers, jnp.ones((1, 64, 64, 3)))
    assert shapes == [(1, 16, 16, 4), (1, 16, 16, 16), (1, 8, 8, 32), (1, 10)]


def test_a_block_starts_as_the_identity_of_its_positive_part():
    model = resnet((8, 8, 3), 10, blocks=[1], width=4, stem="cifar")
    params, buffers = initialized(model)
    module = model.bind(params, buffers)
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 4))
    np.testing.assert_array_equal(module.blocks[0](x), jax.nn.relu(x))


@pytest.mark.full
def test_running_statistics_move_in_training_and_serve_evaluation():
    model = resnet((8, 8, 1), 3, blocks=[1], width=4, stem="cifar")
    params, buffers = initialized(model)
    x = 3 + jax.random.normal(jax.random.key(1), (64, 8, 8, 1))
    module = model.bind(params, buffers)
    for _ in range(60):
        trained = module(x)
    module.eval()
    np.testing.assert_allclose(module(x), trained, rtol=2e-2, atol=2e-2)


@pytest.mark.full
def test_group_norm_has_no_state_and_treats_each_image_by_itself():
    model = resnet((8, 8, 1), 3, blocks=[1, 1], width=8, stem="cifar", norm="group", groups=4)
    params, buffers = initialized(model)
    assert not jax.tree.leaves(buffers)
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
    run = jax.jit(lambda p, rows: model.bind(p, buffers)(rows))
    both = [run(params, rows) for rows in (x, x[:2])]
    np.testing.assert_allclose(both[0][:2], both[1], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_bfloat16_computes_near_float32_and_returns_float32_logits():
    settings = {"blocks": [1, 1], "width": 8, "stem": "cifar"}
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
    found = []
    for dtype in ("float32", "bfloat16"):
        model = resnet((8, 8, 3), 3, compute_dtype=dtype, **settings)
        params, buffers = initialized(model)
        assert {leaf.dtype for leaf in jax.tree.leaves((params, buffers))} == {jnp.dtype("float32")}
        found.append(jax.jit(lambda p, b, m=model: m.bind(p, b)(x))(params, buffers))
    assert found[1].dtype == jnp.float32
    np.testing.assert_allclose(found[1], found[0], atol=0.05)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give either depth"),
        ({"depth": 18, "blocks": [1]}, "give either depth"),
        ({"depth": 50, "norm": "group", "width": 48}, "groups 32 must divide width 48: use 24"),
    ],
)
def test_settings_that_contradict_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        ResnetConfig.model_validate({"type": "resnet", **settings})
