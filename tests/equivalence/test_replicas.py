"""Replicas of new parameters have the same bits on every device, their own shards included."""

import jax
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.parity.trace import FirstSteps, noted
from jaxdist.trees import flatten_with_names

SECTIONS = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {
        "type": "synthetic", "kind": "images", "height": 3, "width": 5, "channels": 3,
        "classes": 7, "examples": 4096, "heldout_examples": 0, "seed": 3,
    },
    "optim": {
        "type": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True,
        "weight_decay": 0.01, "schedule": {"type": "constant"},
    },
    "seed": 62,
    "train": {"steps": 3, "batch_size": 9},
    "mesh": {"tensor": 2, "data": 3},
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.every(2)
def test_a_shard_that_is_kept_equals_the_one_that_was_sent(stage, devices):
    """XLA may fuse the update into both, and round each in its own way."""
    reduce = {"type": "ring", "chunks": 3, "bucket_bytes": 4096}
    parallel = {"reduce": reduce, "zero": {"stage": stage, "whole_below": 0}}
    config = validate(Document({**SECTIONS, "parallel": parallel}), ExperimentConfig)
    steps = FirstSteps(noted(build(config, devices=devices[:6])))
    state = steps.run(steps.begin())[1]
    for name, leaf in flatten_with_names(state.params):
        first: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            own = np.asarray(shard.data)
            np.testing.assert_array_equal(own, first.setdefault(str(shard.index), own), name)
    assert jax.tree.leaves(state.params)
