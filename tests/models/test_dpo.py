"""Direct preference optimization, against the formula in numpy and a difference quotient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.models.loss import weighted
from jaxdist.models.tuning.dpo import Dpo

B, L, V = 3, 6, 5


class Pairs:
    """Eight pairs of answers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        answer = np.zeros((2, L), np.float32)
        answer[:, 2:] = 1
        tokens = random.integers(0, V, (2, L + 1)).astype(np.int32)
        return {"tokens": tokens, "segments": np.ones((2, L), np.int32), "answer": answer}


def batch_of(rows: int) -> dict[str, Any]:
    examples = [Pairs()[i] for i in range(rows)]
    made = {name: jnp.stack([one[name] for one in examples]) for name in examples[0]}
    return {**made, "weight": jnp.array([1.0, 0.0, 2.0])}


def by_hand(logits: np.ndarray, batch: dict[str, Any], reference: np.ndarray, beta: float) -> float:
    """Return the loss from the paper's equation 7, in float64."""
    logits = np.asarray(logits, np.float64).reshape(B, 2, L, V)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = []
    for row in range(B):
        sums = [
            sum(
                logs[row, k, t, batch["tokens"][row, k, t + 1]]
                for t in range(L)
                if batch["answer"][row, k, t]
            )
            - reference[row, k]
            for k in range(2)
        ]
        losses.append(np.log1p(np.exp(-beta * (sums[0] - sums[1]))))
    weight = np.asarray(batch["weight"], np.float64)
    return float((np.array(losses) * weight).sum() / weight.sum())


def test_loss_and_gradients_are_those_of_the_formula():
    batch = batch_of(B)
    logits = jax.random.normal(jax.random.key(0), (2 * B, L, V))
    reference = np.random.default_rng(1).normal(size=(B, 2)).astype(np.float32) - 6
    given = {**batch, "reference": jnp.asarray(reference)}

    def mean(logits: jax.Array) -> jax.Array:
        found = Dpo(0.5)(lambda *_: logits, given)["loss"]
        return found.total / found.weight

    loss, gradient = jax.value_and_grad(mean)(logits)
    np.testing.assert_allclose(loss, by_hand(np.asarray(logits), batch, reference, 0.5), rtol=1e-5)
    direction = np.random.default_rng(2).normal(size=logits.shape)
    step = 1e-6
    ends = [
        by_hand(np.asarray(logits, np.float64) + sign * step * direction, batch, reference, 0.5)
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), slope, rtol=1e-5)


def built(**model: Any) -> Any:
    gpt = {"type": "gpt", "layers": 1, "embed": 16, "heads": 2, **model}
    values = {
        "model": gpt,
        "data": {"type": "import", "path": "test_dpo:Pairs", "vocab_size": V},
        "loss": {"type": "dpo"},
        "optim": {"type": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 1, "batch_size": 4},
    }
    return build(validate(Document(values), ExperimentConfig), devices=jax.devices()[:1])


@pytest.mark.full
def test_the_frozen_base_is_the_reference_of_adapters():
    """B begins at zero, so that the model is its own reference, and the loss log 2."""
    program = built(lora={"rank": 1, "alpha": 1.0, "targets": ["blocks/*"]}).program
    params = program.init().params
    given = weighted(batch_of(B))
    sums_of = jax.jit(lambda params: program.compute.objective.sums(params, {}, given, None))
    value, (sums, _) = sums_of(params)
    np.testing.assert_allclose(value / sums["loss"].weight, np.log(2), rtol=1e-6)
    params["lora"] = jax.tree.map(lambda x: x + 0.3, params["lora"])
    moved = sums_of(params)[0]
    assert abs(float(moved - value)) > 1e-4


def test_a_loss_without_a_reference_is_refused():
    with pytest.raises(ConfigError, match=r"needs a reference model: set model\.lora"):
        built()
