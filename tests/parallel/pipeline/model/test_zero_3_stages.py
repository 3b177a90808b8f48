"""ZeRO 3 in a pipeline: the numbers of one device, and what gathers send and hold."""

import itertools
from functools import cache, partial

import jax
import numpy as np
import pytest
from chosen import quick

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.trees import tree_bytes

GPT = {"type": "gpt", "layers": 4, "embed": 16, "heads": 2, "mlp": 24, "vocab_multiple": 8}


def experiment(mesh, parallel, *, model=GPT, microbatches=4, **optim):
    sections = {
        "model": model,
        "data": {
            "type": "synthetic", "kind": "tokens", "window": 8, "vocab_size": 29,
            "heldout_examples": 0,
        },
        "optim": {"type": "adamw", "learning_rate": 1e-2, "eps": 1e-3, **optim},
        "train": {"steps": 3, "batch_size": 24, "microbatches": microbatches},
        "mesh": mesh,
        "parallel": parallel,
    }  # fmt: skip
    count = int(np.prod(list(mesh.values())))
    return build(validate(Document(sections), ExperimentConfig), devices=jax.devices()[:count])


def trained(made, count=3):
    """Losses of the first steps, and the parameters after them; every mesh draws equal ones."""
    program, state, losses = made.program, made.program.init(), []
    with made.loader.batches() as batches:
        for batch in itertools.islice(batches, count):
            state, metrics = program.train(state, batch)
            losses.append(float(metrics[0]))
    return losses, jax.tree.map(np.asarray, program.home.used(state).params)


@cache
def alone(microbatches):
    """The losses and parameters of one device, whose batch is that of so many microbatches."""
    return trained(experiment({"data": 1}, {}, microbatches=microbatches))


def zero_3(gather, **more):
    """ZeRO 3 of every tensor, and a pipeline."""
    return {"zero": {"stage": 3, "whole_below": 0}, "pipeline": {"gather": gather, **more}}


PLANS = {
    "step": ({"data": 2, "stage": 2}, zero_3("step"), {}),
    "task": ({"data": 2, "stage": 2}, zero_3("task", activations="stash"), {}),
    "task, in a V, tensor": (
        {"data": 2, "stage": 2, "tensor": 2},
        zero_3("task", schedule={"type": "zb_v"}),
        {},
    ),
    "step, chunks, loss scale": (
        {"data": 2, "stage": 2},
        zero_3("step", schedule={"type": "interleaved", "chunks": 2}),
        {"loss_scale": {"type": "dynamic", "init_scale": 64.0}},
    ),
    # Three devices divide no dim, so that shards have zeros; layers 3 and 1 lie on all stages.
    "task, uneven": ({"data": 3, "stage": 2}, zero_3("task", layers=[3, 1]), {}),
    "step, uneven": ({"data": 3, "stage": 2}, zero_3("step", layers=[3, 1]), {}),
}


# Each form of a gather has a row of the full ones. Stages in a V beside an axis tensor:
# tests/equivalence/test_meshes.py.
FULL = ("step, chunks, loss scale", "task, uneven")


@pytest.mark.parametrize("name", quick(*FULL, of=PLANS, slow=True))
@pytest.mark.full
def test_results_are_those_of_one_device(name, devices):
    mesh, parallel, optim = PLANS[name]
    losses, params = trained(experiment(mesh, parallel, **optim))
    expected, theirs = alone(4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-4), params, theirs)


def compiled(gather):
    """The experiment of a plan, and the ledger of its step."""
    wide = {**GPT, "embed": 128, "mlp": 256, "tied_head": False, "vocab_multiple": 1}
    made = experiment({"data": 2, "stage": 2}, zero_3(gather), model=wide)
    program = made.program
    step = program.train.lower(program.state_shapes, program.batch).compile()
    return program, ledger(step, program.layout.mesh)


@pytest.mark.slow
def test_a_step_gathers_a_stage_once_and_tasks_gather_their_layers(devices):
    (program, once), (_, tasks) = compiled("step"), compiled("task")
    params = program.model.params
    layers = tree_bytes(params["blocks"]) / 2
    rest = tree_bytes(params) - 2 * layers
    for read in (once, tasks):
        # Three arrays a parameter, of which a device holds a half of its stage's.
        assert read.memory.argument_bytes == pytest.approx(3 * (layers + rest) / 2, rel=0.01)
    sent = sum(c.sent_bytes * c.times_high for c in once.collectives if c.kind == "all-gather")
    assert sent == (layers + rest) / 2
    gathers = [c for c in tasks.collectives if c.kind == "all-gather"]
    assert {c.times_low for c in gathers} == {0}
    a_tick = sum(c.sent_bytes * c.times_high for c in gathers) / program.compute.ticks.ticks
    # A tick's forward and backward task gather their chunk; the first and the last also the rest.
    assert layers < a_tick < layers + 3 * rest
    assert tasks.memory.temp_bytes < once.memory.temp_bytes
