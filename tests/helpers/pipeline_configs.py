"""A small decoder that tests train on any mesh for a few steps."""

import itertools
from functools import partial

import jax
import numpy as np
from programs import put_state

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build

STEPS, PARAMS_ATOL = 3, 1e-4
"""The number of steps, and the tolerance of parameters: a tenth of the largest change in a step.

An element whose gradient is only rounding noise changes by less than this tolerance.
"""
GPT = {"type": "gpt", "layers": 6, "embed": 32, "heads": 4, "mlp": 64, "vocab_multiple": 8}
ADAMW = {"type": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0}
TOKENS = {
    "type": "synthetic", "kind": "tokens", "window": 8, "vocab_size": 64, "heldout_examples": 0,
}  # fmt: skip


def config_of(
    mesh, pipeline=None, *, data=TOKENS, model=(), loss=None, sharding=None, optim=ADAMW, **train
):
    sections = {
        "model": {**({} if "type" in model else GPT), **dict(model)},
        "loss": loss,
        "data": data,
        "optim": optim,
        "train": {"steps": STEPS, "batch_size": 16, "microbatches": 4, **train},
        "mesh": mesh,
        "sharding": sharding or {},
        "parallel": {"pipeline": pipeline or {}},
    }
    return validate(Document(sections), ExperimentConfig)


def experiment(mesh, *given, **options):
    count = int(np.prod([*mesh.values()]))
    return build(config_of(mesh, *given, **options), devices=jax.devices()[:count])


def trained(made, begun=None):
    """Return the losses of the steps and of an evaluation after them, and the last parameters.

    Args:
      made: the experiment.
      begun: the first state, from `drawn`, or None to draw a state.
    """
    program = made.program
    state = program.init() if begun is None else put_state(program, begun)
    losses, batch = [], None
    with made.loader.batches() as batches:
        for batch in itertools.islice(batches, STEPS):
            state, metrics = program.train(state, batch)
            losses.append(float(metrics[0]))
    loss = program.evaluate(state.params, state.buffers, batch)["loss"]
    losses.append(float(loss.total / loss.weight))
    return np.array(losses), jax.tree.map(np.asarray, program.home.used(state).params)


def drawn(made):
    """Return the initial state of an experiment, on the host."""
    return jax.device_get(made.program.init())


def same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    closely = partial(np.testing.assert_allclose, rtol=0, atol=PARAMS_ATOL)
    jax.tree.map(closely, found[1], expected[1])
