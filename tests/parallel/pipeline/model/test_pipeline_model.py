"""Models in stages from a config: what is refused, and what the compiled step holds and sends."""

import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError, ShardingError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.models.loss import Mean, next_token
from jaxdist.parallel.pipeline.called import inputs_of
from jaxdist.trees import tree_bytes

GPT = {"type": "gpt", "layers": 4, "embed": 64, "heads": 4, "vocab_multiple": 8}
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 0}

DIGITS = {"type": "images", "source": "digits"}


def scheduled(schedule):
    return {"parallel": {"pipeline": {"schedule": schedule}}}


def experiment(
    mesh, parallel=None, *, model=GPT, data=TOKENS, microbatches=4, count=None, loss=None, **optim
):
    sections = {
        **({} if loss is None else {"loss": loss}),
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
        ({"stage": 4}, {"model": {**GPT, "layers": 3}},
         r"3 layers cannot fill 4 chunks \(schedule 1f1b on 4 stages\), each of which needs .*: "
         r"use 4 layers or more, or a smaller mesh\.stage$"),
        ({"stage": 2}, scheduled({"type": "interleaved", "chunks": 4}),
         r"4 layers cannot fill 8 chunks .*8 layers or more, .*fewer chunks a stage \(4 now\)"),
        ({"stage": 2}, {"parallel": {"pipeline": {"layers": [1, 2, 1]}}},
         r"layers \[1, 2, 1\] are 3 counts that add up to 4, for 2 chunks .*give 2 counts that"),
        ({"stage": 2}, {"parallel": {"pipeline": {"layers": [3, 2]}}},
         r"2 counts that add up to 5, for 2 chunks .* and 4 layers: .*add up to 4, or null"),
        ({"stage": 4}, {"microbatches": 2, **scheduled({"type": "zb_h1"})},
         r"zb_h1: 4 stages need at least 4 microbatches, got 2"),
        ({"stage": 2}, {"model": {"type": "mlp", "hidden": [8]}, "data": DIGITS},
         r"mesh\.stage 2: Mlp has no blocks .*missing: embed, trunk, head.*leave out mesh\.stage"),
        ({"stage": {"dcn": 2, "ici": 1}}, {}, "mesh.stage spans two networks"),
    ],
)  # fmt: skip
def test_what_no_pipeline_can_run_is_refused_with_numbers(mesh, given, message, devices):
    sizes = mesh["stage"]
    count = sizes if isinstance(sizes, int) else 2
    with pytest.raises((ConfigError, ShardingError), match=message):
        experiment(mesh, count=count, **given)


def test_what_goes_from_stage_to_stage_needs_no_sequence(devices):
    """Rows and features alone, of a model that is not ours."""
    sizes = {"features": 64, "classes": 10, "layers": 3, "embed": 6, "mlp": 4}
    model = {"type": "import", "path": "benchmarks.draws.imported:Tower", "args": sizes}
    sections = {
        "model": model,
        "data": DIGITS,
        "loss": {"type": "classification"},
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 2, "batch_size": 8, "microbatches": 2},
        "mesh": {"stage": 2, "tensor": 2},
    }
    made = build(validate(Document(sections), ExperimentConfig), devices=devices[:4])
    state, _ = jax.eval_shape(made.program.train, made.program.state_shapes, made.program.batch)
    assert jax.tree.structure(state) == jax.tree.structure(made.program.state_shapes)


def step_of(made):
    program = made.program
    return ledger(
        program.train.lower(program.state_shapes, program.batch).compile(), program.layout.mesh
    )


@pytest.mark.full
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


@pytest.mark.slow
def test_gradients_cross_the_data_axis_once_however_many_microbatches(devices):
    sent = {
        count: step_of(experiment({"data": 2, "stage": 2}, microbatches=count, count=4)).sent_bytes(
            "data"
        )
        for count in (2, 8)
    }
    assert sent[8] == pytest.approx(sent[2], rel=0.01)


@pytest.mark.slow
def test_zero_2_sums_gradients_in_shards_once_a_microbatch(devices):
    wide = {**GPT, "embed": 256}
    one, two = (
        experiment({"data": 4, "stage": 2}, {"zero": {"stage": stage}}, model=wide)
        for stage in (1, 2)
    )
    params, after = two.program.model.params, step_of(two)
    layers = tree_bytes(params["blocks"]) / 2
    assert step_of(one).memory.temp_bytes - after.memory.temp_bytes > 0.6 * layers
    # A tick has one task: where the ledger counts each, every other one is skipped.
    scatters = [c for c in after.collectives if c.kind == "reduce-scatter"]
    assert {c.times_low for c in scatters} == {0}
    a_task = sum(c.sent_bytes * c.times_high for c in scatters) / two.program.compute.ticks.ticks
    # The embedding is tied: its gradients come from the first and from the last stage.
    shared = tree_bytes(params) - 2 * layers
    assert a_task == pytest.approx(3 / 4 * (layers + 2 * shared), rel=0.02)


def steps_of(made, count=3):
    """Metrics of the first steps, by name, and the state after them."""
    program, state, found = made.program, made.program.init(), []
    with made.loader.batches() as batches:
        for batch in itertools.islice(batches, count):
            state, metrics = program.train(state, batch)
            found.append(dict(zip(program.metrics, metrics.tolist(), strict=True)))
    return found, state


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loss_scale_reaches_every_stage_and_changes_no_gradient(zero, devices):
    scale = {"type": "dynamic", "init_scale": 2.0**10, "growth_steps": 2}
    given = {"parallel": {"zero": {"stage": zero, "whole_below": 64}}}
    if zero == 2:  # The weight of a microbatch's loss needs no frozen layers, which ZeRO wraps.
        given["model"] = {**GPT, "freeze": ["blocks/attention/*"]}
    (theirs, _), (ours, state) = (
        steps_of(experiment({"data": 2, "stage": 2}, count=4, **given, **optim))
        for optim in ({"skip_nonfinite": True}, {"loss_scale": scale})
    )
    for name in ("loss", "grad_norm"):
        assert [m[name] for m in ours] == pytest.approx([m[name] for m in theirs], rel=1e-5)
    assert [m["loss_scale"] for m in ours] == [2.0**10, 2.0**10, 2.0**11]
    assert float(state.loss_scale.scale) == 2.0**11


@pytest.mark.full
def test_a_loss_scale_that_overflows_anywhere_skips_the_step(devices):
    scale = {"type": "dynamic", "init_scale": 3e38, "max_scale": 3e38, "backoff": 2.0**-60}
    narrow = {"model": {**GPT, "compute_dtype": "bfloat16"}}
    made = experiment({"stage": 2}, count=2, loss_scale=scale, **narrow)
    ours, _ = steps_of(made)
    assert ours[0]["skipped_steps"] == 1
    assert ours[-1]["skipped_in_a_row"] == 0


@pytest.mark.full
def test_stages_in_float16_skip_the_steps_that_one_device_skips(devices):
    """A backward pass that began with the scale times the tokens would overflow sooner."""
    optim = {
        "master_weights": "float16",
        "loss_scale": {"type": "dynamic", "init_scale": 2.0**20},
    }
    (theirs, _), (ours, _) = (
        steps_of(experiment({axis: size}, count=size, **optim), 6)
        for axis, size in (("data", 1), ("stage", 2))
    )
    assert [m["loss_scale"] for m in ours] == [m["loss_scale"] for m in theirs]
    assert ours[0]["skipped_in_a_row"] == 1
    assert ours[-1]["skipped_in_a_row"] == 0
    assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=1e-3)


def heavy(module, batch):
    """The loss of as many tokens as a large batch has."""
    found = next_token(module, batch)["loss"]
    return {"loss": Mean(found.total * 1e6, found.weight * 1e6)}


@pytest.mark.full
def test_stages_in_float16_bear_many_tokens_without_a_loss_scale(devices, monkeypatch):
    monkeypatch.setitem(sys.modules, "heavy_loss", SimpleNamespace(heavy=heavy))
    loss = {"type": "import", "path": "heavy_loss:heavy"}
    narrow = {"master_weights": "float16", "skip_nonfinite": True}
    (found, *_), _ = steps_of(experiment({"stage": 2}, count=2, loss=loss, **narrow), 1)
    assert found["skipped_steps"] == 0


def test_a_loss_must_call_the_model():
    with pytest.raises(ConfigError, match="does not call the model, which a pipeline requires"):
        inputs_of(lambda module, batch: batch["x"].sum(), {"x": jnp.ones(3)})
    assert inputs_of(lambda module, batch: module(batch["x"], 2), {"x": 1}) == (1, 2)
