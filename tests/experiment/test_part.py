"""The part of a model that is trained: frozen parameters have no gradients and no state."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.trees import flatten_with_names, tree_bytes, tree_size

GPT = {"type": "gpt", "layers": 2, "embed": 32, "heads": 2, "mlp": 64}
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 8, "vocab_size": 64}
ADAMW = {"type": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}


def built(model: dict[str, Any], **sections: Any) -> Experiment:
    given = {"model": {**GPT, **model}, "data": TOKENS, "optim": ADAMW, **sections}
    given.setdefault("train", {"steps": 2, "batch_size": 8})
    config = validate(Document(given), ExperimentConfig)
    count = math.prod(config.mesh.sizes().values())
    return build(config, devices=jax.devices()[: max(count, 1)])


def names(tree: Any) -> set[str]:
    return {name for name, _ in flatten_with_names(tree)}


def trained_a_step(experiment: Experiment) -> tuple[Any, Any]:
    """Return the state before and after a step, on the host."""
    program = experiment.program
    state = program.init()
    before = jax.device_get(program.home.used(state))
    with experiment.loader.batches() as batches:
        state, _ = program.train(state, next(batches))
    return before, jax.device_get(program.home.used(state))


def test_frozen_parameters_have_no_gradients_and_no_state():
    program = built({"freeze": ["blocks/*", "embedding"]}).program
    state = program.own_shapes
    found = jax.eval_shape(program.gradients, program.state_shapes, program.batch)
    assert names(found.grads) == {"norm/scale"}
    assert len(names(state.params)) == 11
    # Two float32 moments for each element, and the counts of steps.
    counts = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    trained = tree_size(program.model.trained)
    assert tree_bytes(state.opt_state) == 8 * trained + tree_bytes(counts)


@pytest.mark.full
def test_a_frozen_parameter_keeps_its_bits_in_shards():
    zero = {"stage": 3, "whole_below": 0}
    experiment = built(
        {"freeze": ["blocks/*"]},
        mesh={"data": 2},
        parallel={"zero": zero, "reduce": {"type": "ring"}},
    )
    before, after = trained_a_step(experiment)
    pairs = zip(flatten_with_names(before.params), jax.tree.leaves(after.params), strict=True)
    moved = {name for (name, old), new in pairs if not np.array_equal(old, new)}
    assert moved == {"embedding", "norm/scale"}


def test_patterns_that_match_nothing_name_the_nearest_parameter():
    with pytest.raises(ConfigError) as refused:
        built({"freeze": ["block/attention/query", "embedding", "lstm"]})
    text = str(refused.value)
    assert "'block/attention/query' matches no parameter" in text
    assert "did you mean 'blocks/attention/query'?" in text
    assert "'lstm' matches no parameter: the model has" in text
    assert "'embedding' matches" not in text


def test_something_must_be_left_to_train():
    with pytest.raises(ConfigError, match="no parameter is left to train: use patterns"):
        built({"freeze": ["*"]})


def test_layers_fetched_ahead_cannot_be_frozen():
    zero = {"stage": 3, "prefetch": True}
    with pytest.raises(ConfigError, match="prefetching layers computes the gradients of all"):
        built(
            {"freeze": ["blocks/*"], "remat": "full"},
            mesh={"data": 2},
            parallel={"zero": zero, "reduce": {"type": "ring"}},
        )


@pytest.mark.slow
def test_a_rate_is_multiplied_by_the_first_pattern_that_matches():
    rates = {"blocks/attention/*": 0.5, "blocks/*": 3.0}
    plain, scaled = (trained_a_step(built({}, optim={**ADAMW, "rates": r})) for r in ({}, rates))
    moves = [
        {name: new - old for (name, old), new in zip(flatten_with_names(before.params),
         jax.tree.leaves(after.params), strict=True)}
        for before, after in (plain, scaled)
    ]  # fmt: skip
    for name, move in moves[0].items():
        attention = name.startswith("blocks/attention/")
        factor = 0.5 if attention else 3.0 if name.startswith("blocks/") else 1.0
        np.testing.assert_allclose(moves[1][name], factor * move, rtol=1e-3, atol=1e-7)


def test_rates_without_a_trained_parameter_are_refused():
    rates = {"*": 2.0, "norm/scale": 3.0, "embeding": 2.0}
    with pytest.raises(ConfigError) as refused:
        built({"freeze": ["embedding"]}, optim={**ADAMW, "rates": rates})
    assert "'norm/scale' has no effect: earlier patterns match all" in str(refused.value)
    assert "'embeding' matches no parameter that is trained" in str(refused.value)
