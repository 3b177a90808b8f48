"""Each variant against what it reproduces."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcriptions import lamb_paper, lamb_timm, lars_paper, lars_timm, norm

from jaxdist.optim.lamb import lamb
from jaxdist.optim.lars import lars

SHAPES = {"kernel": (4, 6), "bias": (6,), "conv": (2, 2, 3, 4), "scale": ()}


def run(transform, weights, grads):
    """The weights after a step on each gradient."""
    weights = jax.tree.map(jnp.asarray, weights)
    state = transform.init(weights)
    step = jax.jit(transform.update)
    for g in grads:
        updates, state = step(jax.tree.map(jnp.asarray, g), state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def close(found, expected, rtol=2e-6):
    flat = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in flat:
        scale = np.abs(np.asarray(b, np.float64)).max() if np.size(b) else 0
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


@pytest.fixture
def grads():
    rng = np.random.default_rng(1)
    return [
        {k: rng.normal(size=s).astype(np.float32) * 3 for k, s in SHAPES.items()} for _ in range(6)
    ]


def test_lamb_paper(weights, grads):
    found = run(lamb(0.1, 0.8, 0.95, 1e-3, 0.05, decay_mask=True, adapt_mask=True), weights, grads)
    setting = {"lr": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "decay": 0.05}
    close(found, {k: lamb_paper(w, [g[k] for g in grads], **setting) for k, w in weights.items()})


def test_lars_paper(weights, grads):
    found = run(lars(2.0, 0.8, 0.05, 0.02, decay_mask=True, adapt_mask=True), weights, grads)
    setting = {"lr": 2.0, "momentum": 0.8, "eta": 0.02, "decay": 0.05}
    close(found, {k: lars_paper(w, [g[k] for g in grads], **setting) for k, w in weights.items()})


def test_lars_paper_keeps_the_rate_of_each_step_in_the_momentum(weights, grads):
    rates = optax.linear_schedule(2.0, 0.0, 4)
    found = run(lars(rates, decay_mask=False, adapt_mask=False), weights, grads)
    expected = run(
        optax.chain(optax.scale_by_learning_rate(rates), optax.trace(0.9)), weights, grads
    )
    close(found, expected)


SCHEDULE = optax.linear_schedule(0.1, 0.01, 5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rate", [0.05, SCHEDULE])
def test_lamb_optax(weights, grads, decay, rate):
    ours = lamb(rate, weight_decay=decay, variant="optax")
    close(run(ours, weights, grads), run(optax.lamb(rate, weight_decay=decay), weights, grads))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rate", [0.05, SCHEDULE])
def test_lars_optax(weights, grads, nesterov, rate):
    ours = lars(rate, 0.7, 0.1, 0.01, 1e-3, variant="optax", nesterov=nesterov)
    theirs = optax.lars(rate, 0.1, True, 0.01, 1e-3, True, 0.7, nesterov)
    close(run(ours, weights, grads), run(theirs, weights, grads))


def test_nesterov_lamb_is_optax_nesterov_adam_and_its_ratio(weights, grads):
    ours = lamb(0.05, weight_decay=0.1, variant="optax", nesterov=True)
    theirs = optax.chain(
        optax.scale_by_adam(eps=1e-6, nesterov=True),
        optax.add_decayed_weights(0.1),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(0.05),
    )
    close(run(ours, weights, grads), run(theirs, weights, grads))


@pytest.mark.parametrize("variant", ["timm", "apex"])
def test_lamb_timm_and_apex(weights, grads, variant):
    """timm states that it follows apex; the transcription stands in for both."""
    decay = {k: 0.05 if len(s) >= 2 else 0.0 for k, s in SHAPES.items()}
    ours = lamb(0.1, weight_decay=0.05, variant=variant)
    expected = lamb_timm(
        weights, grads, lr=0.1, b1=0.9, b2=0.999, eps=1e-6, decay=decay, max_grad_norm=1.0
    )
    close(run(ours, weights, grads), expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_timm(weights, grads, nesterov):
    setting = {"momentum": 0.9, "eta": 0.02, "eps": 1e-2, "nesterov": nesterov}
    rates = [float(SCHEDULE(i)) for i in range(len(grads))]
    ours = lars(SCHEDULE, 0.9, 0.05, 0.02, 1e-2, variant="timm", nesterov=nesterov)
    expected = {
        k: lars_timm(
            w, [g[k] for g in grads], lr=rates, decay=0.05 if w.ndim >= 2 else 0.0, **setting
        )
        for k, w in weights.items()
    }
    close(run(ours, weights, grads), expected)


def test_apex_by_hand():
    """|g| = 5 is clipped to 1, so that the moments of the first step are g / 5 and its square."""
    w, g = {"w": np.array([[3.0, 4.0]])}, {"w": np.array([[3.0, 4.0]])}
    step = run(lamb(0.1, eps=1.0, weight_decay=1.0, variant="apex"), w, [g])["w"]
    adam = np.array([[0.6 / 1.6, 0.8 / 1.8]])
    r = adam + w["w"]
    close(step, w["w"] - 0.1 * 5 / norm(r) * r)
    bare = run(lamb(0.1, eps=1.0, weight_decay=0.0, variant="apex"), w, [g])["w"]
    close(bare, w["w"] - 0.1 * adam)


@pytest.mark.parametrize(("size", "coefficient"), [(0.001, 0.01), (0.2, 0.2), (1.0, 0.3)])
def test_deepspeed_by_hand(size, coefficient):
    """The direction is all ones, so the ratio is the size of the weights, within [0.01, 0.3]."""
    w, g = {"w": np.full((2, 2), size)}, {"w": np.full((2, 2), 7.0)}
    found = run(lamb(0.5, eps=0.0, weight_decay=0.0, variant="deepspeed"), w, [g])["w"]
    close(found, w["w"] - 0.5 * coefficient, rtol=1e-5)


@pytest.mark.parametrize(
    ("grad", "decay", "ratio"), [(1.0, 0.1, 0.02 * 2 / (1 + 0.1 * 2) / 0.5), (1e-3, 1e-3, 1.0)]
)
def test_apex_larc_by_hand(grad, decay, ratio):
    w, g = {"w": np.full((1, 1), 2.0)}, {"w": np.full((1, 1), grad)}
    found = run(lars(0.5, 0.9, decay, 0.02, variant="apex"), w, [g])["w"]
    close(found, w["w"] - 0.5 * ratio * (g["w"] + decay * w["w"]))


def test_apex_larc_leaves_a_layer_without_gradient_alone():
    w, g = {"w": np.full((2, 2), 2.0)}, {"w": np.zeros((2, 2))}
    close(run(lars(0.5, weight_decay=0.1, variant="apex"), w, [g]), w)
    assert norm(run(lars(0.5, weight_decay=0.1), w, [g])["w"]) < norm(w["w"])


FLOATS = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
LEAVES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3).flatmap(
    lambda shape: st.tuples(
        arrays.arrays(np.float32, shape, elements=FLOATS),
        arrays.arrays(np.float32, (2, *shape), elements=FLOATS),
    )
)


@pytest.mark.full
@settings(max_examples=25)
@given(LEAVES, st.sampled_from([1.0, 1e-12, 1e12, 0.0]), st.sampled_from([1.0, 1e-12, 1e12, 0.0]))
def test_paper_for_any_shape_and_size(leaf, weight_size, grad_size):
    w, g = (leaf[0] * np.float32(weight_size), leaf[1] * np.float32(grad_size))
    # Squares of less than 1e-38 are zero in float32, where the transcription still counts them.
    w, g = (np.where(np.abs(x) < 1e-15, 0, x).astype(np.float32) for x in (w, g))
    every = {"decay_mask": True, "adapt_mask": True}
    adam = {"b1": 0.9, "b2": 0.999, "eps": 1e-6, "decay": 0.01}
    for transform, transcription, setting in (
        (lamb(0.1, **every), lamb_paper, adam),
        (lars(0.1, **every), lars_paper, {"momentum": 0.9, "eta": 0.001, "decay": 1e-4}),
    ):
        state, x = transform.init(w), jnp.asarray(w)
        for gradient in g:
            updates, state = transform.update(jnp.asarray(gradient), state, x)
            x = optax.apply_updates(x, updates)
        expected = transcription(w, g, lr=0.1, **setting)
        assert np.isfinite(x).all()
        scale = np.abs(expected).max() if expected.size else 0
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4 * scale)
