"""The vision transformer beside a plain computation of its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initialized import initialized
from pydantic import ValidationError

from jaxdist.errors import ConfigError
from jaxdist.models.functional import functional
from jaxdist.models.images.vit import VitConfig
from jaxdist.trees import tree_size


def vit(shape=(6, 4, 3), classes=5, **changes):
    given = {"type": "vit", "patch": 2, "layers": 2, "embed": 12, "heads": 3, **changes}
    config = VitConfig.model_validate(given)
    return functional(lambda rngs: config.build(rngs, shape=shape, classes=classes))


def plain(params, image):
    """The logits in float64, written from the paper's formulas."""
    from scipy.special import erf

    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, own):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * own["scale"] + own["bias"]

    rows = [
        image[:, y : y + 2, x : x + 2].reshape(len(image), -1) for y in (0, 2, 4) for x in (0, 2)
    ]
    x = np.stack(rows, 1) @ p["patches"]["kernel"] + p["patches"]["bias"] + p["positions"]
    for i in range(2):
        b = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"])
        a, h = b["attention"], norm(x, b["attention_norm"])
        q, k, v = (
            np.einsum("bld,dhk->bhlk", h, a[name]) + a[f"{name}_bias"][None, :, None]
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bhik,bhjk->bhij", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("bhij,bhjk,hkd->bid", weights, v, a["out"]) + a["out_bias"]
        m, h = b["mlp"], norm(x, b["mlp_norm"])
        h = h @ m["up"] + m["up_bias"]
        x = x + (h * 0.5 * (1 + erf(h / np.sqrt(2)))) @ m["down"] + m["down_bias"]
    return norm(x, p["norm"]).mean(1) @ p["output"]["kernel"] + p["output"]["bias"]


@pytest.mark.full
def test_logits_are_those_of_the_formulas():
    model = vit()

    # Norms, biases and positions that start as 0 or 1 would hide where they are used.
    def draw(key):
        keys = iter(jax.random.split(key, 99))
        params = model.init(jax.random.key(0))[0]
        return jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), params)

    params = jax.jit(draw)(jax.random.key(5))
    image = jax.random.uniform(jax.random.key(1), (3, 6, 4, 3))
    found = jax.jit(lambda p: model.bind(p, {})(image))(params)
    np.testing.assert_allclose(found, plain(params, np.asarray(image)), rtol=1e-4, atol=1e-4)


def test_sizes_are_the_published_ones():
    # torchvision's ViT-B/16 has 86,567,656, of which a class token has 768 and its position 768.
    base = vit((224, 224, 3), 1000, patch=16, layers=12, embed=768, heads=12)
    assert tree_size(base.params) == 86_567_656 - 2 * 768
    assert all(base.dims.values())


@pytest.mark.full
def test_bfloat16_computes_near_float32_and_returns_float32_logits():
    image, found = jax.random.uniform(jax.random.key(1), (3, 6, 4, 3)), []
    for dtype in ("float32", "bfloat16"):
        model = vit(compute_dtype=dtype)
        params, _ = initialized(model)
        found.append(model.bind(params, {})(image))
    assert found[1].dtype == jnp.float32
    np.testing.assert_allclose(found[1], found[0], atol=0.05)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match="heads 5 must divide embed 12: use 4"):
        vit(heads=5)
    with pytest.raises(ValidationError, match="scan_unroll 3 exceeds layers 2: use at most 2"):
        vit(scan_unroll=3)
    with pytest.raises(ConfigError, match=r"patch 4 must divide images of 6 x 4 pixels: use 2"):
        vit(patch=4)
