"""A checkpoint of any plan continues under any other, to the bit."""

import itertools
from functools import cache

import jax
import numpy as np
import pytest

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.trees import flatten_with_names

PLANS = {
    "one device": ({"data": 1}, None, 0),
    "zero 3, manual": ({"data": 8}, {"type": "ring"}, 3),
    "zero 2, two networks": ({"data": {"dcn": 2, "ici": 4}}, {"type": "xla"}, 2),
    "tensor x data, zero 1": ({"tensor": 2, "data": 2}, None, 1),
    "stage x data, zero 1": ({"stage": 2, "data": 2}, None, 1),
    "two stages' layers in a V": ({"stage": 2}, None, 0),
}
V = {"schedule": {"type": "zb_v"}}
DEVICES = {"one device": 1, "tensor x data, zero 1": 4, "stage x data, zero 1": 4}
DEVICES["two stages' layers in a V"] = 2


@cache
def experiment(plan):
    mesh, reduce, stage = PLANS[plan]
    sections = {
        "model": {"type": "gpt", "layers": 4, "embed": 32, "heads": 4},
        "data": {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 0},
        "optim": {"type": "lamb", "learning_rate": 1e-2},
        "train": {"steps": 4, "batch_size": 8, "microbatches": 4 if "V" in plan else 1},
        "parallel": {
            "reduce": reduce,
            "zero": {"stage": stage, "whole_below": 64},
            "pipeline": V if "V" in plan else {},
        },
        "mesh": mesh,
    }
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[: DEVICES.get(plan, 8)])


@cache
def drawn():
    """The first state, on the host: to draw it on each mesh costs more than to train."""
    return jax.device_get(experiment("one device").program.init())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, devices):
    """A directory of checkpoints by plan, and the state that each holds."""
    found = {}
    for plan in PLANS:
        made, path = experiment(plan), tmp_path_factory.mktemp("plan") / "checkpoints"
        shardings = jax.tree.map(lambda struct: struct.sharding, made.program.state_shapes)
        # Copied, since the step is given the memory of its state to reuse.
        stored = made.program.home.stored(jax.tree.map(np.array, drawn()))
        state = jax.device_put(stored, shardings)
        with made.loader.batches() as batches:
            for batch in itertools.islice(batches, 2):
                state, _ = made.program.train(state, batch)
        state = made.program.home.to_files(state)
        with CheckpointStore(path, keep=1, keep_best=False, on_event=print) as store:
            store.save(2, state, metadata={})
            store.wait()
        found[plan] = path, jax.tree.map(np.asarray, state)
    return found


HUB = "zero 3, manual"
STAGED, V_SHAPED = "stage x data, zero 1", "two stages' layers in a V"
AWKWARD = {
    (V_SHAPED, STAGED),
    ("zero 2, two networks", V_SHAPED),
    (STAGED, "tensor x data, zero 1"),
}
"""Layers that change their order or their stages, and none of it through the hub."""


def pair(writer, reader):
    always = HUB in (writer, reader) or (writer, reader) in AWKWARD
    return pytest.param(writer, reader, marks=() if always else pytest.mark.full)


@pytest.mark.parametrize(
    ("writer", "reader"), [pair(*both) for both in itertools.product(PLANS, PLANS)]
)
def test_what_one_plan_saved_another_loads(writer, reader, trained):
    path, saved = trained[writer]
    made = experiment(reader)
    with CheckpointStore(path, keep=1, keep_best=False, on_event=print) as store:
        state = store.restore(made.program.state_shapes).state
    for (name, ours), theirs in zip(flatten_with_names(state), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=name)
    shardings = jax.tree.map(lambda struct: struct.sharding, made.program.state_shapes)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, shardings))
    state = made.program.home.from_files(state)
    with made.loader.batches(2) as batches:
        after, metrics = made.program.train(state, next(batches))
    assert int(after.step) == 3
    assert np.isfinite(float(metrics[0]))
