"""A decoder whose parameters have two bytes: it learns as with four, evaluates and generates."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.train.evaluate import evaluate
from jaxdist.train.generate import Generator
from jaxdist.train.sampling import Sampling

STEPS = 12


MODEL = {"type": "gpt", "layers": 2, "embed": 32, "heads": 4, "vocab_multiple": 8}


def experiment(compute_dtype, mesh, **optim):
    sections = {
        "model": {**MODEL, "compute_dtype": compute_dtype},
        "data": {"type": "synthetic", "kind": "tokens", "window": 16, "heldout_examples": 32},
        "optim": {"type": "adamw", "learning_rate": 1e-2, "clip_norm": 1.0, **optim},
        "train": {"steps": STEPS, "batch_size": 32, "microbatches": 2},
        "mesh": mesh,
    }
    config = validate(Document(sections), ExperimentConfig)
    return build(config, devices=jax.devices()[: math.prod(mesh.values())])


def trained(compute_dtype, mesh, **optim):
    found = experiment(compute_dtype, mesh, **optim)
    state = found.program.init()
    with found.loader.batches() as batches:
        for batch in itertools.islice(batches, STEPS):
            state, _ = found.program.train(state, batch)
    assert found.heldout is not None
    with found.heldout.evaluation_batches() as batches:
        return found, state, evaluate(found.program, state.params, state.buffers, batches)["loss"]


@pytest.fixture(scope="module")
def wide_loss():
    """On one device, whose program compiles soonest."""
    return trained("float32", {"data": 1})[2]


# In shards: test_guarded_step.py; in stages: tests/parallel/pipeline/model; bfloat16 on other
# meshes: the draws of `.ci/run`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute_dtype", "dtype", "optim"),
    [
        ("bfloat16", "bfloat16", {"bf16_moments": True}),
        ("float32", "float16", {"loss_scale": {"type": "dynamic"}}),
    ],
)
def test_a_decoder_in_two_bytes_learns_as_in_four(compute_dtype, dtype, optim, wide_loss):
    mesh = {"data": 2, "tensor": 4}
    found, state, loss = trained(compute_dtype, mesh, master_weights=dtype, **optim)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}
    np.testing.assert_allclose(loss, wide_loss, rtol=0.02)
    run = Generator(found.program, 16, found.dataset.vocab_size or 0)
    given = {"prompts": [[1, 2]], "count": 2, "sampling": Sampling()}
    tokens = run(state.params, state.buffers, **given)[0].tokens
    assert len(tokens) == 4
