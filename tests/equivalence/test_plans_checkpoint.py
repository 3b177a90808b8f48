"""A checkpoint of any plan continues under any other, to the bit."""

import itertools
from functools import cache

import jax
import numpy as np
import pytest
from programs import put_state

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


def some_state():
    """Numbers that are nowhere zero or equal, in the model's order."""
    rng = np.random.default_rng(0)
    shapes = experiment("one device").program.own_shapes
    return jax.tree.map(lambda s: rng.uniform(1, 9, s.shape).astype(s.dtype), shapes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, devices):
    """A directory with a checkpoint by plan, all of them of the same state."""
    found = {}
    for plan in PLANS:
        program, path = experiment(plan).program, tmp_path_factory.mktemp("plan") / "checkpoints"
        state = program.home.to_files(put_state(program, some_state()))
        with store(path) as checkpoints:
            checkpoints.save(2, state, metadata={})
        found[plan] = path
    return found


def store(path):
    return CheckpointStore(path, keep=1, keep_best=False, on_event=print)


full, slow = pytest.mark.full, pytest.mark.slow
HUB = "zero 3, manual"
STAGED, V_SHAPED = "stage x data, zero 1", "two stages' layers in a V"
AWKWARD = {
    (V_SHAPED, STAGED),
    ("zero 2, two networks", V_SHAPED),
    (STAGED, "tensor x data, zero 1"),
}
"""Layers that change their order or their stages, and none of it through the hub."""


ALONE = {STAGED: full}
"""Plans whose steps the full tests take; those of the others are taken in tests/equivalence."""


def pair(writer, reader):
    always = HUB in (writer, reader) or (writer, reader) in AWKWARD
    return pytest.param(writer, reader, marks=() if always else slow)


@pytest.mark.parametrize(
    ("writer", "reader"), [pair(*both) for both in itertools.product(PLANS, PLANS)]
)
def test_what_one_plan_saved_another_loads(writer, reader, saved):
    program = experiment(reader).program
    state = restored(saved[writer], program)
    for (name, ours), theirs in zip(
        flatten_with_names(state), jax.tree.leaves(some_state()), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=name)
    shardings = jax.tree.map(lambda struct: struct.sharding, program.state_shapes)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, shardings))


def restored(path, program):
    with store(path) as checkpoints:
        return checkpoints.restore(program.state_shapes).state


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(V_SHAPED, marks=full),
        *(pytest.param(plan, marks=ALONE.get(plan, slow)) for plan in PLANS if plan != V_SHAPED),
    ],
)
@pytest.mark.slow
def test_steps_go_on_with_what_is_loaded(reader, saved):
    made = experiment(reader)
    state = made.program.home.from_files(restored(saved[HUB], made.program))
    begun = int(state.step)
    with made.loader.batches(begun) as batches:
        after, metrics = made.program.train(state, next(batches))
    assert int(after.step) == begun + 1
    assert np.isfinite(float(metrics[0]))
