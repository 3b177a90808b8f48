"""Parameters in the host's memory: the bits of a run do not change."""

from functools import partial

import jax
import numpy as np
import pytest
from programs import put_state
from test_offload import assert_same, on_host, train, zeros

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.run.memory import bytes_per_device
from jaxdist.train.replicas import replicas_of
from jaxdist.trees import flatten_with_names

NARROW = {"type": "mlp", "hidden": [32, 16]}
GPT = {
    "type": "gpt", "layers": 2, "embed": 16, "heads": 2, "mlp": 32, "remat": "full",
    "tied_head": False,
}  # fmt: skip
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 8, "heldout_examples": 0}
ADAMW = {"type": "adamw", "learning_rate": 1e-2, "clip_norm": 1.0}
ALL = ["*"]
LORA = {"lora": {"rank": 2, "alpha": 2, "targets": ["blocks/*"]}, "compute_dtype": "bfloat16"}
MARKS = {"sgd": (), "zero 3": pytest.mark.full, "lora": pytest.mark.full}
PLANS = {
    "zero 1": ({"data": 4}, {"stage": 1}, GPT, ADAMW, ["blocks/*"], 1),
    "zero 2": ({"data": 4}, {"stage": 2}, GPT, ADAMW, ["embedding", "output"], 2),
    "zero 3": ({"data": 4}, {"stage": 3, "offload": True}, GPT, ADAMW, ALL, 2),
    "tensor": ({"data": 2, "tensor": 2}, {"stage": 3}, GPT, ADAMW, ["blocks/mlp/*"], 1),
    "frozen": ({"data": 4}, {"stage": 1}, GPT | {"freeze": ["blocks/*"]}, ADAMW, ["blocks/*"], 1),
    "lora": ({"data": 2}, {"stage": 3}, GPT | LORA, ADAMW, ["blocks/*"], 1),
    "sgd": ({"data": 4}, {"stage": 2}, NARROW,
            {"type": "sgd", "learning_rate": 1e-2}, ["*kernel"], 1),
}  # fmt: skip


def experiment(plan, *, resting=True, **changes):
    mesh, zero, model, optim, names, microbatches = PLANS[plan]
    zero = {"whole_below": 32, **zero, **({"offload_parameters": names} if resting else {})}
    sections = {
        "model": model,
        "data": TOKENS if model["type"] == "gpt" else {"type": "images", "source": "digits"},
        "optim": optim,
        "train": {"steps": 4, "batch_size": 8, "microbatches": microbatches},
        "parallel": {"zero": zero},
        "mesh": mesh,
    }
    for path, value in changes.items():
        section, *name = path.split("__")
        sections[section] = {**sections[section], name[0]: value} if name else value
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[: 2 if plan == "lora" else 4])


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=MARKS.get(p, pytest.mark.slow)) for p in PLANS]
)
def test_a_run_has_the_same_bits_with_parameters_in_the_hosts_memory(plan, devices):
    device, host = (experiment(plan, resting=resting) for resting in (False, True))
    initial = jax.device_get(device.program.home.used(device.program.init()))
    theirs, expected = train(device, put_state(device.program, initial))
    ours, state = train(host, put_state(host.program, initial))
    np.testing.assert_array_equal(ours, theirs)
    assert_same(host.program.home.used(state), device.program.home.used(expected))
    shapes = host.program.state_shapes
    assert on_host(state) == on_host(shapes)
    resting = host.program.exchange.zero.resting
    assert resting == {n for n, _ in flatten_with_names(shapes.params)} & resting != set()
    assert on_host(shapes.params) == resting
    whole, held = (bytes_per_device(m.program.state_shapes.params) for m in (device, host))
    assert bytes_per_device(shapes.params, host=True) == whole - held > 0
    batch = dict(jax.tree.map(zeros, host.program.batch))
    sums = [
        one.program.evaluate(one.program.evaluated(s), s.buffers, batch)
        for one, s in ((device, expected), (host, state))
    ]
    jax.tree.map(np.testing.assert_array_equal, *sums)


@pytest.mark.full
def test_a_checkpoint_does_not_depend_on_where_the_parameters_were(tmp_path, devices):
    device, host = (experiment("sgd", resting=resting).program for resting in (False, True))
    state = host.init()
    assert on_host(state) == on_host(host.state_shapes)
    for number, (writer, reader) in enumerate([(host, device), (device, host), (host, host)]):
        with CheckpointStore(
            tmp_path / str(number), keep=1, keep_best=False, on_event=print
        ) as store:
            saved = put_state(writer, jax.device_get(host.home.used(state)))
            store.save(0, writer.home.to_files(saved), metadata={})
            # The step donates the memory that the save may still read.
            writer.train(saved, dict(jax.tree.map(zeros, writer.batch)))
            loaded = reader.home.from_files(store.restore(reader.state_shapes).state)
        assert on_host(loaded) == on_host(reader.state_shapes)
        assert_same(reader.home.used(loaded), host.home.used(state))
    replicas = replicas_of(host)
    assert not replicas.differences(np.asarray(replicas.digests(state)))


def refusal(plan="sgd", **changes):
    with pytest.raises(ConfigError) as error:
        experiment(plan, **changes)
    return str(error.value)


def test_what_cannot_rest_in_the_hosts_memory_is_refused(devices, monkeypatch):
    zero = {"stage": 3, "whole_below": 32, "offload_parameters": ["nothing/*"]}
    assert "'nothing/*' matches no parameter" in refusal(parallel__zero=zero)
    padded = {"type": "mlp", "hidden": [33, 15]}
    zero["offload_parameters"] = ["*kernel"]
    found = refusal(parallel__zero=zero, model=padded)
    assert "padded to" in found
    assert "choose other parameters" in found
    assert "an explicit reduction needs" in refusal(parallel__reduce={"type": "ring"})
    monkeypatch.setattr("jaxdist.train.offload.HOST_MEMORY", "none_such")
    assert "leave out parallel.zero.offload_parameters" in refusal()


@pytest.mark.parametrize(
    "changes",
    [{"remat": "none"}, {"remat": "elementwise"}, {"remat": ["full", "dots"]}, {"scan_unroll": 2}],
)
def test_several_layers_on_the_device_at_once_are_refused(changes, devices):
    program = experiment("zero 1", model=GPT | changes).program
    shapes = program.state_shapes
    given = shapes.params, shapes.buffers, dict(program.batch)
    with pytest.raises(ConfigError, match=r"has several layers on .*: set model\.(remat|scan_)"):
        jax.eval_shape(partial(program.exchange.sums, program.compute), *given)


def test_without_zero_the_setting_has_no_effect_and_says_so(devices):
    made = experiment("sgd", parallel__zero={"offload_parameters": ["*kernel"]})
    assert any("offload_parameters has no effect" in line for line in made.notices)
    assert not on_host(made.program.state_shapes)
