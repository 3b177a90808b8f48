"""Models in stages from a config: what is refused, and what the compiled step holds and sends."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError, ShardingError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.parallel.pipeline.model import _inputs
from jaxdist.trees import tree_bytes

GPT = {"type": "gpt", "layers": 4, "embed": 64, "heads": 4, "vocab_multiple": 8}
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 0}

DIGITS = {"type": "images", "source": "digits"}


def scheduled(schedule):
    return {"parallel": {"pipeline": {"schedule": schedule}}}


def experiment(mesh, parallel=None, *, model=GPT, data=TOKENS, microbatches=4, count=None, **optim):
    sections = {
        "model": model,
        "data": data,
        "optim": {"type": "adamw", "learning_rate": 1e-3, **optim},
        "train": {"steps": 4, "batch_size": 16, "microbatches": microbatches},
        "mesh": mesh,
        "parallel": parallel or {},
    }
    devices = jax.devices()[: count or 8]
    return build(validate(Document(sections), ExperimentConfig), devices=devices)


@pytest.mark.parametrize(
    ("mesh", "given", "message"),
    [
        ({"stage": 4}, {"model": {**GPT, "layers": 6}},
         r"length 6 does not divide over mesh axis 'stage' of size 4"),
        ({"stage": 2}, scheduled({"type": "interleaved", "chunks": 4}),
         r"4 layers do not fill 8 chunks on 2 stages alike \(4 left over\): use a multiple of 8"),
        ({"stage": 4}, {"microbatches": 2, **scheduled({"type": "zb_h1"})},
         r"zb_h1: 4 stages need at least 4 microbatches, got 2"),
        ({"stage": 2}, {"model": {"type": "mlp", "hidden": [8]}, "data": DIGITS},
         r"mesh\.stage 2: Mlp has no blocks .*missing: embed, trunk, head.*take mesh\.stage away"),
        ({"stage": {"dcn": 2, "ici": 1}}, {}, "mesh.stage lies over two networks"),
        ({"stage": 2}, {"master_weights": "bfloat16", "loss_scale": {"type": "dynamic"}},
         "loss_scale does not reach the microbatches of a pipeline"),
    ],
)  # fmt: skip
def test_what_no_pipeline_can_run_is_refused_with_numbers(mesh, given, message, devices):
    sizes = mesh["stage"]
    count = sizes if isinstance(sizes, int) else 2
    with pytest.raises((ConfigError, ShardingError), match=message):
        experiment(mesh, count=count, **given)


def step_of(made):
    program = made.program
    return ledger(
        program.train.lower(program.state_shapes, program.batch).compile(), program.layout.mesh
    )


def test_a_stage_holds_its_own_layers_and_sends_activations(devices):
    wide = {**GPT, "embed": 256}
    whole, split = (
        experiment(mesh, model=wide, count=count)
        for mesh, count in (({"data": 1}, 1), ({"stage": 4}, 4))
    )
    read = step_of(split)
    layers = tree_bytes(whole.program.model.params["blocks"])
    rest = tree_bytes(whole.program.model.params) - layers
    # Three arrays a parameter: a fourth of the layers, all of the rest.
    assert read.memory.argument_bytes == pytest.approx(3 * (layers / 4 + rest), rel=0.01)
    permutes = [c for c in read.collectives if c.kind == "collective-permute"]
    assert permutes
    # Of layers nothing is sent: a microbatch's activations, and the sum of the rest's gradients.
    activations = 16 // 4 * 16 * 256 * 4
    assert {c.payload_bytes for c in permutes} == {activations}
    others = sum(c.payload_bytes for c in read.collectives if c.kind != "collective-permute")
    assert others < 1.1 * rest + 4096


def test_gradients_cross_the_data_axis_once_however_many_microbatches(devices):
    sent = {
        count: step_of(experiment({"data": 2, "stage": 2}, microbatches=count, count=4)).sent_bytes(
            "data"
        )
        for count in (2, 8)
    }
    assert sent[8] == pytest.approx(sent[2], rel=0.01)


def test_a_loss_must_call_the_model():
    with pytest.raises(ConfigError, match="does not call the model, so that a pipeline cannot"):
        _inputs(lambda module, batch: batch["x"].sum(), {"x": jnp.ones(3)})
    assert _inputs(lambda module, batch: module(batch["x"], 2), {"x": 1}) == (1, 2)
