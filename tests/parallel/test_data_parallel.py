"""The explicit reduction in the compiled step: what it sends, and on which axis."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.loss import Mean
from jaxdist.parallel.contract import Gradients, StepInputs
from jaxdist.parallel.exchange.all_reduce import AllReduce
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.trees import tree_bytes
from jaxdist.validity.zero import ZeroConfig

P = jax.sharding.PartitionSpec


def experiment(mesh: dict, reduce: dict | None, **changes) -> Experiment:
    sections = {
        "model": {"type": "mlp", "hidden": [64, 32]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 5, "batch_size": 16},
        "parallel": {"reduce": reduce},
        "mesh": mesh,
    }
    return build(validate(Document({**sections, **changes}), ExperimentConfig))


def compiled(found: Experiment):
    program = found.program
    return program.train.lower(program.state_shapes, program.batch).compile()


def test_the_ring_is_in_the_program_and_sends_its_formula():
    found = experiment({"data": 8}, {"type": "ring", "bucket_bytes": 2**30})
    read = ledger(compiled(found), found.layout.mesh)
    permutes = [c for c in read.collectives if c.kind == "collective-permute"]
    assert sum(c.times_high for c in permutes) == 14
    assert {c.axes for c in permutes} == {("data",)}
    size = tree_bytes(found.program.model.params)
    width = -(-size // 4 // 8) * 4
    assert sum(c.sent_bytes * c.times_high for c in permutes) == 14 * width
    # What is left to XLA are the sums of the loss: a few scalars.
    rest = [c for c in read.collectives if c.kind != "collective-permute"]
    assert sum(c.payload_bytes for c in rest) <= 64


@pytest.mark.full
def test_the_gradients_of_tensor_shards_are_not_gathered():
    """Each device reduces its own shard over the data axis; no gradients move along tensor."""
    auto = experiment({"data": 2, "tensor": 4}, None)
    ours = experiment({"data": 2, "tensor": 4}, {"type": "ring"})
    of = {
        name: ledger(compiled(found), found.layout.mesh)
        for name, found in (("auto", auto), ("ours", ours))
    }
    assert of["ours"].sent_bytes("tensor") <= of["auto"].sent_bytes("tensor") + 64
    assert of["ours"].sent_bytes("data") <= 1.01 * of["auto"].sent_bytes("data") + 64


@pytest.mark.full
def test_the_second_step_does_not_compile_again():
    found = experiment({"data": 4, "tensor": 2}, {"type": "ring"})
    state = found.program.init()
    with found.loader.batches() as batches:
        for batch in itertools.islice(batches, 3):
            state, _ = found.program.train(state, batch)
    assert found.program.train._cache_size() == 1


class Drawn(NamedTuple):
    """A `Compute` whose gradients are random numbers, and whose loss weighs 60 over all rows."""

    def gradients(self, held, around):
        rows = held.batch["rows"]
        mean = Mean(rows.sum(), jnp.float32(60 / 8))
        buffers = {"mean": rows.mean(), "count": held.buffers["count"] + 1}
        return Gradients({"w": jax.random.uniform(held.key, (8,))}, {"loss": mean}, buffers)


def test_each_device_draws_its_own_random_numbers_and_buffers_become_their_mean():
    mesh = build_mesh(MeshConfig.model_validate({"data": 8}))
    whole = {"w": NamedSharding(mesh, P())}
    zero = ZeroSplit(mesh, ZeroConfig(), (), {"w": None})
    exchange = AllReduce(whole, zero, axes=("data",), algorithm=Ring())

    def run(key):
        params = {"w": jnp.zeros(8)}
        buffers, batch = {"mean": jnp.zeros(()), "count": jnp.int32(4)}, {"rows": jnp.arange(16.0)}
        held = StepInputs(params, params, buffers, None, batch, key)
        return exchange.gradients(Drawn(), held, ())[0]

    key = jax.random.key(0)
    grads, sums, buffers = jax.jit(run)(key)
    expected = sum(jax.random.uniform(jax.random.fold_in(key, i), (8,)) for i in range(8)) / 60
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-6)
    found = (float(sums["loss"].total), float(buffers["mean"]), int(buffers["count"]))
    assert found == (120.0, 7.5, 5)


def test_what_the_reduction_cannot_do_is_told_when_the_config_is_read():
    with pytest.raises(ConfigError, match=r"parallel\.reduce.*hierarchical"):
        experiment({"data": 8}, {"type": "hierarchical"})


@pytest.mark.slow
def test_the_mean_of_whole_gradients_takes_no_more_memory_than_by_constraints():
    """Turns are few layers of the stacks, and the mean is taken in them."""

    def peak(reduce) -> int:
        model = {"type": "gpt", "layers": 8, "embed": 128, "heads": 4, "remat": "full"}
        tokens = {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 0}
        found = experiment(
            {"data": 8}, reduce, model=model, data=tokens, train={"steps": 1, "batch_size": 8}
        )
        return ledger(compiled(found), found.layout.mesh).memory.peak_bytes

    assert peak({"type": "xla"}) <= peak(None)
