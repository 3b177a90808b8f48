"""A transformer that a user of flax wrote: the same numbers on every mesh as on one device.

Tolerances as in `tests/equivalence`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from programs import put_state

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build

STEPS = 2
full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)
EXPLICIT = {"reduce": {"type": "ring"}, "zero": {"stage": 3, "whole_below": 0}}
THREE = {"data": 2, "stage": 2, "tensor": 2}
VMAP = "Helped by nnx.vmap"
MODELS = {
    "Listed": {"path": "plain_models:Listed", "args": {"layers": 2}},
    "Vmapped": {"path": "plain_models:Vmapped"},
    "Helped": {"path": "plain_models:Helped"},
    VMAP: {"path": "plain_models:Helped", "args": {"by_vmap": True}},
}
PATTERNS = {"*/kernel": ["...", "mlp"], "*": "whole"}


def experiment(name: str, mesh: dict[str, int], **sections: Any) -> Experiment:
    given = {
        "model": {"type": "import", **MODELS[name]},
        "data": {"type": "synthetic", "kind": "tokens", "window": 8, "vocab_size": 60},
        "loss": {"type": "next_token"},
        "optim": {"type": "lamb", "learning_rate": 1e-3},
        "train": {"steps": STEPS, "batch_size": 16, "microbatches": 2},
        "sharding": {"params": PATTERNS},
        "mesh": mesh,
        **sections,
    }
    count = int(np.prod([*mesh.values()]))
    config = validate(Document(given), ExperimentConfig)
    return build(config, devices=jax.devices()[:count])


def trained(found: Experiment, begun: Any) -> tuple[list[float], Any]:
    """The losses of a few steps, and the parameters after them in the model's order."""
    program, losses = found.program, []
    state = put_state(program, begun)
    with found.loader.batches(0) as batches:
        for _ in range(STEPS):
            state, values = program.train(state, next(batches))
            losses.append(float(values[0]))
    cut = program.home.to_step(program.home.to_files(state))
    return losses, jax.device_get(cut.params)


@cache
def alone(name: str) -> tuple[Any, list[float], Any]:
    """The state that one device draws, and what it comes to."""
    one = experiment(name, {"data": 1})
    begun = jax.device_get(one.program.init())
    return begun, *trained(one, begun)


@pytest.mark.parametrize(
    ("name", "mesh", "parallel"),
    [
        slow("Listed", {"data": 4, "tensor": 2}, {}),  # in the draws of `.ci/run`: linen
        slow("Vmapped", {"data": 4, "tensor": 2}, EXPLICIT),
        slow("Vmapped", THREE, {}),  # in stages below with another schedule
        slow("Helped", {"data": 4, "tensor": 2}, EXPLICIT),  # as Vmapped is
        slow("Helped", THREE, {"zero": {"stage": 2}}),  # as VMAP is, below
        full(VMAP, THREE, {"pipeline": {"schedule": {"type": "interleaved", "chunks": 2}}}),
    ],
)
@pytest.mark.full
def test_it_trains_as_on_one_device(name: str, mesh: Any, parallel: Any) -> None:
    found = experiment(name, mesh, parallel=parallel)
    assert not [notice for notice in found.notices if "no effect" in notice]
    begun, expected, reference = alone(name)
    losses, params = trained(found, begun)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, reference)


@pytest.mark.parametrize("name", ["Vmapped", "Helped", VMAP])
@pytest.mark.every(3)
def test_a_stack_that_is_left_whole_still_counts_layers(name: str) -> None:
    """For pipelines, and for optimizers that take a norm for each layer."""
    program = experiment(name, {"data": 1}, sharding={"params": {"*": "whole"}}).program
    assert program.dims["blocks/up/kernel"] == ("layers", None, None)
    assert program.dims["blocks/norm/scale"] == ("layers", None)
    assert program.dims["output/kernel"] == (None, None)


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "stage": 2}])
def test_no_dims_are_needed_where_no_axis_splits_parameters(mesh: Any) -> None:
    """What is left out is as `"*": whole`: stacks count their layers."""
    program = experiment("Vmapped", mesh, sharding={}).program
    assert program.dims["blocks/up/kernel"] == ("layers", None, None)
    assert program.dims["output/kernel"] == (None, None)


def test_a_rule_that_splits_parameters_over_data_asks_for_their_dims() -> None:
    with pytest.raises(ConfigError, match="name no dims"):
        experiment("Vmapped", {"data": 4}, sharding={"rules": {"embed": "data"}})


def test_what_has_no_dims_is_told_once_for_all_blocks() -> None:
    with pytest.raises(ConfigError) as refused:
        experiment("Listed", {"data": 2, "tensor": 2}, sharding={})
    text = str(refused.value)
    assert "31 parameters name no dims" in text
    assert '"blocks/*/attention/out/kernel": [null, null, null]  # [4, 4, 16], 2 param' in text
    assert len(text.splitlines()) < 25


def test_blocks_in_a_list_have_no_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"Listed has no blocks .*nnx\.vmap.*missing: trunk"):
        experiment("Listed", THREE)
