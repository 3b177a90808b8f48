import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initialized import initialized

from jaxdist.errors import ConfigError, RunError
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.loss import (
    Mean,
    NextTokenConfig,
    as_sums,
    check_fields,
    classification,
    next_token,
)

ROWS = {"weight": jnp.array([1.0, 1.0, 0.0])}


def test_next_token_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]] * 2, [[0.1, 0.1, 0.8]] * 2]))
    batch = {
        "tokens": jnp.array([[0, 0, 1], [0, 2, 2]]),
        "segments": jnp.zeros((2, 2), jnp.int32),
        "weight": jnp.array([1.0, 0.0]),
    }
    found = next_token(lambda tokens, segments: logits, batch)["loss"]
    np.testing.assert_allclose(found.total, np.log(2) + np.log(4), rtol=1e-6)
    assert found.weight == 2


B, L, VOCAB = 4, 32, 1000


@pytest.mark.parametrize(
    "chunks", [pytest.param(2, marks=pytest.mark.slow), 8, pytest.param(32, marks=pytest.mark.slow)]
)
@pytest.mark.full
def test_chunks_change_nothing_but_memory(chunks):
    """Loss, weight, all gradients; some rows without weight, some with a half."""
    config = GptConfig(type="gpt", layers=1, embed=16, heads=2)
    model = functional(lambda rngs: config.build(rngs, vocab_size=VOCAB))
    params, buffers = initialized(model)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (B, L + 1), 0, VOCAB),
        "segments": jnp.zeros((B, L), jnp.int32),
        "weight": jnp.array([1.0, 0.0, 0.5, 1.0]),
    }

    def compiled(chunks):
        loss = NextTokenConfig(type="next_token", chunks=chunks).build()

        def total(params):
            found = loss(model.bind(params, buffers), batch)["loss"]
            return found.total, found.weight

        return jax.jit(jax.value_and_grad(total, has_aux=True)).lower(params).compile()

    whole, cut = compiled(1), compiled(chunks)
    for ours, reference in zip(*map(jax.tree.leaves, (cut(params), whole(params))), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-5)
    # Logits and their gradient are whole in the one, a chunk's in the other.
    logits_bytes = B * L * VOCAB * 4
    saved = [c.memory_analysis().temp_size_in_bytes for c in (whole, cut)]
    assert saved[0] - saved[1] > 0.9 * (1 - 1 / chunks) * logits_bytes


def test_chunks_divide_the_sequence():
    shapes = {"tokens": (31,), "segments": (30,)}
    with pytest.raises(ConfigError, match=r"loss\.chunks 4 does not divide .* 30 positions: use 3"):
        check_fields(NextTokenConfig(type="next_token", chunks=4), shapes)


def test_chunks_need_a_head():
    batch = {"tokens": jnp.zeros((1, 5), int), "segments": jnp.zeros((1, 4), int), **ROWS}
    with pytest.raises(ConfigError, match=r"needs a model of embedding, blocks and head.*chun"):
        NextTokenConfig(type="next_token", chunks=2).build()(lambda *_: None, batch)


def test_classification_counts_only_rows_with_weight():
    logits = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]]))
    seen = []
    batch = {"image": jnp.full((3, 1, 1, 1), 255, jnp.uint8), "label": jnp.array([0, 1, 0]), **ROWS}
    found = classification(lambda x: seen.append(x) or logits, batch, label_smoothing=0.0)
    np.testing.assert_allclose(found["loss"].total, np.log(2) + np.log(10), rtol=1e-6)
    assert found["accuracy"] == Mean(1.0, 2.0)
    assert seen[0].max() == 1


def test_label_smoothing_spreads_the_target():
    logits = jnp.log(jnp.array([[0.9, 0.1]]))
    batch = {"image": jnp.ones((1, 1, 1, 1)), "label": jnp.array([0]), "weight": jnp.ones(1)}
    found = classification(lambda x: logits, batch, label_smoothing=0.5)["loss"]
    np.testing.assert_allclose(found.total, -0.75 * np.log(0.9) - 0.25 * np.log(0.1), rtol=1e-5)


def test_bare_means_weigh_the_rows():
    assert as_sums(jnp.float32(3), ROWS)["loss"] == Mean(6.0, 2.0)
    found = as_sums((jnp.float32(3), {"error": jnp.float32(1)}), ROWS)
    assert found["error"] == Mean(2.0, 2.0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (jnp.ones(3), r"\(3,\) for 'loss'"),
        ("text", r"str  for 'loss'"),
        (
            {"accuracy": jnp.float32(1)},
            r"\['accuracy'\], without the value to minimise: add the key 'loss'",
        ),
        (None, r"NoneType"),
    ],
)
def test_anything_else_is_refused(result, message):
    with pytest.raises(RunError, match=message):
        as_sums(result, ROWS)
