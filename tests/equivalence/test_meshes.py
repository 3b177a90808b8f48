"""The same numbers on every mesh: loss and parameters after 5 steps, float32.

Tolerances: what differs between meshes is only the order in which floats are summed. The loss
agrees to 1e-5 relative. Parameters agree to 2e-4 absolute: an element whose gradient is rounding
noise may step by up to the learning rate in either direction under Adam, so its bound is a fraction
of 5 steps x 1e-3, not an ulp.
"""

import itertools
from functools import cache, partial

import jax
import numpy as np
import pytest
from mesh_rows import CELLS, FULL_CELLS, MORE_CELLS, MORE_ZERO, REDUCTIONS, SLOW_ZERO, SPLIT, ZERO
from programs import put_state

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build

LOSS_RTOL = 1e-5
PARAMS_ATOL = 2e-4
STEPS = 5

MODELS = {
    "gpt": {
        "model": {"type": "gpt", "layers": 2, "embed": 64, "heads": 8, "vocab_multiple": 8},
        "data": {"type": "synthetic", "kind": "tokens", "window": 32},
    },
    "gpt-grouped-untied-remat": {
        "model": {
            "type": "gpt", "layers": 2, "embed": 64, "heads": 8, "kv_heads": 4,
            "tied_head": False, "remat": "full", "isolate_documents": True,
        },
        "data": {"type": "synthetic", "kind": "tokens", "window": 32},
        "sharding": {"rules": {"kv_heads": None}},
    },
    "gpt-four-layers": {
        "model": {
            "type": "gpt", "layers": 4, "embed": 64, "heads": 8, "vocab_multiple": 8,
            "remat": "save_qkv",
        },
        "data": {"type": "synthetic", "kind": "tokens", "window": 32},
    },
    "cnn": {
        "model": {"type": "cnn", "channels": [8, 16], "hidden": 32},
        "data": {"type": "images", "source": "digits"},
    },
    "mlp": {
        "model": {"type": "mlp", "hidden": [64, 32]},
        "data": {"type": "images", "source": "digits"},
    },
}  # fmt: skip

COVERED = [
    ("gpt", {"data": 4, "tensor": 2}, None, {"stage": 2}, {"microbatches": 2}),
    ("cnn", {"data": 8}, None, {"stage": 3}, {"microbatches": 2}),
    ("gpt-grouped-untied-remat", {"data": 8}, {"type": "halving"}, {"stage": 3}, {}),
    ("gpt", SPLIT, {"type": "xla"}, {"stage": 2, "scope": "ici"}, {}),
    ("cnn", {"data": 8}, {"type": "double_tree"}, {"stage": 3}, {}),
]
"""Rows that the covering set of `jaxdist parity` has as well."""


PIPELINES = [
    ("gpt", {"stage": 2}, {"pipeline": {"ahead": True}}, {"microbatches": 4}),
    ("gpt", {"data": 4, "stage": 2}, {"pipeline": {"schedule": {"type": "gpipe"}}}, {}),
    (
        "gpt-grouped-untied-remat",
        {"data": 2, "stage": 2, "tensor": 2},
        {"zero": {"stage": 1}},
        {"microbatches": 4},
    ),
    (
        "gpt-four-layers",
        {"data": 2, "stage": 2, "tensor": 2},
        {"zero": {"stage": 2}, "pipeline": {"schedule": {"type": "zb_v"}}},
        {"microbatches": 4},
    ),
]
COVERED_PIPELINES = [
    (
        "gpt-four-layers",
        {"stage": 2, "data": 4},
        {
            "reduce": {"type": "ring"},
            "pipeline": {"schedule": {"type": "interleaved", "chunks": 2}},
        },
        {"microbatches": 2},
    ),
    (
        "gpt-four-layers",
        {"stage": 2, "tensor": 2},
        {"pipeline": {"schedule": {"type": "zb_v"}, "activations": "stash"}},
        {"microbatches": 4},
    ),
    (
        "gpt-four-layers",
        {"stage": 4, "data": 2},
        {"pipeline": {"schedule": {"type": "zb_h1"}}},
        {"microbatches": 8},
    ),
]
"""Schedules that the covering set of `jaxdist parity` has as well, of another model."""


ADAMW = {"type": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}
LAMB = {"type": "lamb", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}


def build_program(name, mesh, reduce=None, zero=None, optim=ADAMW, pipeline=None, **changes):
    sections = {
        "parallel": {
            "reduce": reduce,
            "zero": {"whole_below": 64, **(zero or {})},
            "pipeline": pipeline or {},
        },
        "optim": optim,
        "train": {"steps": STEPS, "batch_size": 16, **changes},
        "mesh": mesh,
    }
    config = validate(Document({**MODELS[name], **sections}), ExperimentConfig)
    size = int(np.prod([np.prod(list(s.values())) if isinstance(s, dict) else s
                        for s in mesh.values()]))  # fmt: skip
    return build(config, devices=jax.devices()[:size])


@cache
def initial(name, lamb=False):
    """The state that one device draws, on the host."""
    program = build_program(name, {"data": 1}, optim=LAMB if lamb else ADAMW).program
    return jax.device_get(program.init())


def train(name, mesh, reduce=None, zero=None, optim=ADAMW, pipeline=None, **changes):
    """Losses of the steps, and the parameters after the last, by name; from `initial`."""
    experiment = build_program(name, mesh, reduce, zero, optim, pipeline, **changes)
    program, losses = experiment.program, []
    state = put_state(program, initial(name, optim == LAMB))
    with experiment.loader.batches() as batches:
        for batch in itertools.islice(batches, STEPS):
            state, metrics = program.train(state, batch)
            losses.append(float(metrics[0]))
    return np.array(losses), jax.tree.map(np.asarray, program.home.used(state).params)


def same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=LOSS_RTOL)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=PARAMS_ATOL), ours[1], theirs[1])


class References(dict):
    """Of each model on one device, trained when it is first needed."""

    def __missing__(self, name):
        self[name] = train(name, {"data": 1})
        return self[name]


@pytest.fixture(scope="module")
def reference():
    return References()


@pytest.mark.parametrize(
    ("name", "mesh", "reduce", "zero", "pipeline", "microbatches"),
    [
        pytest.param("gpt-grouped-untied-remat", {"data": 2, "tensor": 4}, None, {"stage": 3}, {},
                     1, marks=pytest.mark.slow),
        ("cnn", {"data": 8}, {"type": "ring"}, {"stage": 2}, {}, 1),
        pytest.param("mlp", {"data": {"dcn": 2, "ici": 4}}, {"type": "xla"}, {"stage": 3}, {}, 1,
                     marks=pytest.mark.slow),
        pytest.param("gpt-four-layers", {"data": 2, "stage": 2, "tensor": 2}, None, {"stage": 2},
                     {"schedule": {"type": "zb_v"}}, 4, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.full
def test_every_mesh_draws_the_state_of_one_device(name, mesh, reduce, zero, pipeline, microbatches):
    program = build_program(
        name, mesh, reduce, zero, pipeline=pipeline, microbatches=microbatches
    ).program
    # Loops that draw the same bits may round the numbers made of them otherwise.
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, jax.device_get(program.home.used(program.init())), initial(name))


def and_in_full(rows, more):
    return [*rows, *(pytest.param(*row, marks=pytest.mark.full) for row in more)]


@pytest.mark.parametrize(("name", "mesh"), and_in_full(CELLS, FULL_CELLS), ids=str)
@pytest.mark.every(3)
def test_a_mesh_equals_one_device(name, mesh, reference):
    same(train(name, mesh), reference[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), MORE_CELLS, ids=str)
def test_every_other_mesh_equals_one_device(name, mesh, reference):
    test_a_mesh_equals_one_device(name, mesh, reference)


@pytest.mark.parametrize(("name", "mesh", "reduce", "changes"), REDUCTIONS, ids=str)
@pytest.mark.every(3)
def test_our_own_reductions_equal_one_device(name, mesh, reduce, changes, reference):
    same(train(name, mesh, reduce, **changes), reference[name])


@pytest.mark.parametrize(
    ("name", "mesh", "reduce", "zero", "changes"), and_in_full(ZERO, MORE_ZERO), ids=str
)
@pytest.mark.every(3)
def test_zero_equals_one_device(name, mesh, reduce, zero, changes, reference):
    same(train(name, mesh, reduce, zero, **changes), reference[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "reduce", "zero", "changes"), [*SLOW_ZERO, *COVERED], ids=str
)
def test_zero_that_parity_covers_equals_one_device(name, mesh, reduce, zero, changes, reference):
    test_zero_equals_one_device(name, mesh, reduce, zero, changes, reference)


@cache
def with_lamb():
    return train("gpt", {"data": 1}, optim=LAMB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "reduce", "zero", "microbatches"),
    [
        ({"data": 4, "tensor": 2}, {"type": "xla"}, {"stage": 3}, 1),
        pytest.param({"data": 8}, None, {"stage": 1}, 1, marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "stage": 2, "tensor": 2}, None, {"stage": 2}, 2, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_lamb_sees_whole_layers_in_their_shards(mesh, reduce, zero, microbatches):
    ours = train("gpt", mesh, reduce, zero, optim=LAMB, microbatches=microbatches)
    same(ours, with_lamb())


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 4}], ids=str)
@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "cnn"])
def test_microbatches_on_a_mesh_equal_one_device(name, mesh, reference):
    same(train(name, mesh, microbatches=4), reference[name])


def test_the_comparison_can_fail(reference):
    """One part in a thousand of the learning rate's effect is seen."""
    losses, params = reference["mlp"]
    moved = jax.tree.map(lambda leaf: leaf + 3e-4, params)
    with pytest.raises(AssertionError):
        same((losses, moved), (losses, params))
    assert losses[0] != losses[-1]


@pytest.mark.parametrize(
    ("name", "mesh", "parallel", "changes"),
    [
        *and_in_full(PIPELINES[:1], PIPELINES[3:]),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in PIPELINES[1:3]),
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_a_pipeline_equals_one_device(name, mesh, parallel, changes, reference):
    same(train(name, mesh, **parallel, **changes), reference[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "parallel", "changes"), COVERED_PIPELINES, ids=str)
def test_a_pipeline_that_parity_covers_equals_one_device(name, mesh, parallel, changes, reference):
    test_a_pipeline_equals_one_device(name, mesh, parallel, changes, reference)
