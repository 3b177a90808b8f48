"""What a loss is given in place of a model that lies on several stages."""

from __future__ import annotations

from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipeline_configs import experiment

from jaxdist.errors import ConfigError
from jaxdist.models.loss import NextTokenConfig
from jaxdist.parallel.pipeline.called import inputs_of
from jaxdist.parallel.pipeline.stand_in import HeadOnly, Output

X = jnp.arange(2.0)
STAND_INS = [HeadOnly(lambda x: x + 1, X), Output(X)]


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda module: module.blocks, "blocks of its model"),
        (lambda module: nnx.state(module, nnx.Param), "the parameters of its model"),
        (lambda module: [*nnx.iter_modules(module)], "the parameters of its model"),
        (jax.tree.leaves, "the parameters of its model"),
    ],
)
def test_it_may_be_called_and_not_read(stand_in: Any, read: Any, what: str) -> None:
    assert stand_in("whatever").shape == X.shape
    with pytest.raises(ConfigError, match=rf"reads {what}, .*mesh\.stage.*optim\.weight_decay"):
        read(stand_in)


def test_python_may_ask_what_it_asks_of_any_object() -> None:
    assert copy(STAND_INS[1]).x is X


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("with_penalty", "embedding"),
        ("with_norm_of_all", "the parameters"),
        ("with_norms_of_modules", "the parameters"),
    ],
)
@pytest.mark.every(3)
def test_a_pipeline_refuses_a_penalty_on_parameters_by_name(name: str, what: str) -> None:
    loss = {"type": "import", "path": f"masked_losses:{name}"}
    with pytest.raises(ConfigError, match=rf"the loss reads {what} of its model, but with mesh"):
        experiment({"stage": 2}, loss=loss)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_built_in_loss_only_calls_its_model(chunks: int) -> None:
    """In chunks it takes the head of each piece, which a pipeline has on its last stage."""
    loss = NextTokenConfig(type="next_token", chunks=chunks).build()
    batch = {
        "tokens": jnp.zeros((2, 5), jnp.int32),
        "segments": jnp.zeros((2, 4), jnp.int32),
        "weight": jnp.ones(2),
    }
    tokens, _ = inputs_of(loss, batch)
    assert tokens.shape == (2, 4)


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda one: type(one).__name__)
def test_a_built_in_loss_may_ask_for_what_it_reads_of_every_model(stand_in: Any) -> None:
    assert (stand_in.measured, stand_in.padded_head) == (None, None)
