import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.errors import RunError
from jaxdist.models.loss import Mean, as_sums, classification, next_token

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
        ({"accuracy": jnp.float32(1)}, r"\['accuracy'\], without 'loss'"),
        (None, r"NoneType"),
    ],
)
def test_anything_else_is_refused(result, message):
    with pytest.raises(RunError, match=message):
        as_sums(result, ROWS)
