"""The optimizer's state in the host's memory: the bits of a run do not change."""

import itertools

import jax
import numpy as np
import pytest
from programs import put_state

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.run.memory import bytes_per_device
from jaxdist.train.replicas import replicas_of
from jaxdist.trees import flatten_with_names

STEPS = 2
MLP = {"type": "mlp", "hidden": [33, 16]}
GPT = {"type": "gpt", "layers": 2, "embed": 16, "heads": 2, "mlp": 32}
TOKENS = {"type": "synthetic", "kind": "tokens", "window": 8, "heldout_examples": 0}
ADAMW = {"type": "adamw", "learning_rate": 1e-2, "clip_norm": 1.0}
PLANS = {
    "zero 1": ({"data": 4}, {"zero": {"stage": 1}}, MLP, ADAMW),
    "zero 2, ring": ({"data": 4}, {"zero": {"stage": 2}, "reduce": {"type": "ring"}}, MLP, ADAMW),
    "zero 3": ({"data": 4}, {"zero": {"stage": 3}}, GPT, {"type": "lamb", "learning_rate": 1e-2}),
    "zero 3, ring": ({"data": 4}, {"zero": {"stage": 3}, "reduce": {"type": "ring"}}, MLP, ADAMW),
    "pipeline": ({"stage": 2, "data": 2}, {"zero": {"stage": 1}}, GPT, ADAMW),
    "muon": (
        {"data": 2, "tensor": 2},
        {"zero": {"stage": 1}},
        GPT,
        {"type": "muon", "learning_rate": 1e-2},
    ),
    "networks": (
        {"data": {"dcn": 2, "ici": 2}},
        {"zero": {"stage": 1, "scope": "ici"}},
        MLP,
        ADAMW,
    ),
    "skips": ({"data": 2}, {"zero": {"stage": 1}}, MLP, ADAMW | {"skip_nonfinite": True}),
}
FULL = {"pipeline", "zero 3"}
SLOW = {"muon", "zero 3, ring", "zero 1"}
"""Plans whose stages, scopes and reductions are in the others; Muon is an optimizer as any."""


def experiment(plan, *, offload):
    mesh, parallel, model, optim = PLANS[plan]
    data = TOKENS if model is GPT else {"type": "images", "source": "digits"}
    zero = {"whole_below": 32, "offload": offload, **parallel["zero"]}
    sections = {
        "model": model,
        "data": data,
        "optim": optim,
        "train": {"steps": 4, "batch_size": 8},
        "parallel": {**parallel, "zero": zero},
        "mesh": mesh,
    }
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[: 2 if plan == "skips" else 4])


def train(made, state, steps=STEPS):
    program, metrics = made.program, []
    with made.loader.batches() as batches:
        for batch in itertools.islice(batches, steps):
            state, found = program.train(state, batch)
            metrics.append(np.asarray(found))
    return metrics, state


def assert_same(ours, theirs):
    for (name, one), other in zip(flatten_with_names(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


def on_host(state):
    return {n for n, x in flatten_with_names(state) if x.sharding.memory_kind == HOST_MEMORY}


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(p, marks=[pytest.mark.full] * (p in FULL) + [pytest.mark.slow] * (p in SLOW))
        for p in PLANS
        if p != "skips"
    ],
)
def test_a_run_has_the_same_bits_with_its_state_in_the_hosts_memory(plan, devices):
    device, host = (experiment(plan, offload=offload) for offload in (False, True))
    initial = jax.device_get(device.program.home.used(device.program.init()))
    theirs, expected = train(device, put_state(device.program, initial))
    ours, state = train(host, put_state(host.program, initial))
    np.testing.assert_array_equal(ours, theirs)
    assert_same(host.program.home.used(state), device.program.home.used(expected))
    shapes = host.program.state_shapes
    assert on_host(state) == on_host(shapes)
    assert on_host(shapes) <= {n for n, _ in flatten_with_names(shapes) if n[:9] == "opt_state"}
    whole, held = (bytes_per_device(m.program.state_shapes.opt_state) for m in (device, host))
    assert held < whole / 10
    assert bytes_per_device(shapes.opt_state, host=True) == whole - held


@pytest.mark.full
def test_a_checkpoint_does_not_depend_on_where_the_state_was(tmp_path, devices):
    device, host = (experiment("zero 1", offload=offload).program for offload in (False, True))
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


def zeros(shape):
    return jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding)


@pytest.mark.full
def test_skipped_steps_and_replicas_are_those_of_the_device(devices):
    program = experiment("networks", offload=True).program
    state = program.init()
    replicas = replicas_of(program)
    assert not replicas.differences(np.asarray(replicas.digests(state)))
    made = [experiment("skips", offload=offload) for offload in (False, True)]
    initial = jax.device_get(made[0].program.home.used(made[0].program.init()))
    found = [train(one, put_state(one.program, initial)) for one in made]
    # The compiler fuses the condition of smaller updates in another way, which rounds differently.
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    ours, theirs = (
        one.program.home.used(state) for one, (_, state) in zip(made, found, strict=True)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), ours, theirs)


def test_devices_that_cannot_access_the_hosts_memory_are_refused(devices, monkeypatch):
    monkeypatch.setattr("jaxdist.train.offload.HOST_MEMORY", "none_such")
    with pytest.raises(ConfigError, match=r"offload true .*have only .*zero\.offload: false"):
        experiment("zero 1", offload=True)
