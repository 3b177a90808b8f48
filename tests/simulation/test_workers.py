"""Workers and servers with a real model: in rounds they are the run on one mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from chosen import quick
from flax import nnx
from runs import DIGITS

from jaxdist.config import Document, validate
from jaxdist.errors import DataError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.simulation.rule import ServerRule
from jaxdist.simulation.simulated import Simulator, cluster_of
from jaxdist.simulation.workers import ModelProblem
from jaxdist.trees import flatten_with_names

STEPS, BATCH = 4, 32


class Noisy(nnx.Module):
    """Draws at random; with `running`, keeps statistics."""

    def __init__(self, rngs, running=False):
        dims = {"kernel_metadata": {"dims": (None, None)}, "bias_metadata": {"dims": (None,)}}
        self.inner = nnx.Linear(64, 16, rngs=rngs, **dims)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 10, rngs=rngs, **dims)
        self.norm = (
            nnx.BatchNorm(16, use_bias=False, use_scale=False, rngs=rngs) if running else None
        )

    def __call__(self, image):
        hidden = self.inner(image.reshape(image.shape[0], -1))
        return self.outer(self.dropout(hidden if self.norm is None else self.norm(hidden)))


SERVERS = {
    "type": "parameter_server",
    "workers": 4,
    "servers": 2,
    "consistency": {"type": "bsp"},
    "placement": {"type": "balanced", "range_bytes": 1024},
}
OPTIMIZERS = {
    "sgd": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "decay": {"type": "sgd", "learning_rate": 0.1, "nesterov": True, "weight_decay": 0.1},
    "lars": {"type": "lars", "learning_rate": 0.1},
    "adamw": {"type": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1},
    "lamb": {"type": "lamb", "learning_rate": 1e-2},
}


def experiment(devices=1, **sections):
    values = {
        **DIGITS,
        "optim": OPTIMIZERS["sgd"],
        "train": {"steps": STEPS, "batch_size": BATCH},
        "eval": {"batches": 1},
        "mesh": {"data": devices},
        **sections,
    }
    return build(validate(Document(values), ExperimentConfig), devices=jax.devices()[:devices])


def trained_on_a_mesh(devices, **sections):
    found = experiment(devices, **sections)
    state = found.program.init()
    for step in range(found.total_steps):
        state, _ = found.program.train(state, found.loader.batch(step))
    return {name: np.asarray(leaf) for name, leaf in flatten_with_names(state.params)}


def rule_of(found):
    program = found.program
    return ServerRule(
        found.config.optim,
        program.optimizer.schedule,
        program.model.params,
        program.dims,
        learning_rate=0.1,
    )


def trained_by_the_rule(devices, **sections):
    """Gradients of one mesh, each parameter updated by itself."""
    found = experiment(devices, **sections)
    state, rule = found.program.init(), rule_of(found)
    tree = jax.tree.structure(state.params)
    params = {name: np.asarray(leaf) for name, leaf in flatten_with_names(state.params)}
    carried = {name: rule.init(name, array) for name, array in params.items()}
    for step in range(found.total_steps):
        placed = jax.tree.unflatten(tree, list(params.values()))
        grads = found.program.gradients(
            replace(state, step=np.int32(step), params=placed), found.loader.batch(step)
        ).grads
        for name, gradient in flatten_with_names(grads):
            given = (name, params[name], np.asarray(gradient), 1.0, carried[name])
            params[name], carried[name] = rule.update(*given)
    return params


QUICK = ("adamw", "lamb")
"""They keep two moments, and scale by norms; the others are between them."""
SLOW = ("lars", "decay")


@pytest.mark.parametrize(
    "name",
    [*quick(*QUICK, of=[n for n in OPTIMIZERS if n not in SLOW]), *quick(of=SLOW, slow=True)],
)
@pytest.mark.every(2)
def test_rounds_are_the_run_on_one_mesh(name):
    """To the bit: sums over workers are those over devices. So is the update where XLA fuses it
    alike in a program of one parameter and in one of all, as with plain momentum; else its last bit
    differs."""
    optim = {"optim": OPTIMIZERS[name]}
    ours = Simulator()(experiment(strategy=SERVERS, **optim))
    for key, expected in trained_by_the_rule(4, **optim).items():
        np.testing.assert_array_equal(ours.params[key], expected)
    for key, expected in trained_on_a_mesh(4, **optim).items():
        if name == "sgd":
            np.testing.assert_array_equal(ours.params[key], expected)
        else:
            np.testing.assert_allclose(ours.params[key], expected, rtol=2e-5, atol=1e-6)
    assert ours.staleness == {0: STEPS * 4 * 2}


@pytest.mark.full
def test_unequal_shares_have_the_mean_of_the_whole_batch():
    strategy = {**SERVERS, "batch_shares": [4, 4, 8, 16]}
    ours = Simulator()(experiment(strategy=strategy))
    for key, expected in trained_on_a_mesh(1).items():
        np.testing.assert_allclose(ours.params[key], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_a_lone_worker_without_waiting_is_the_run_on_one_device():
    strategy = {**SERVERS, "workers": 1, "consistency": {"type": "async"}}
    ours = Simulator()(experiment(strategy=strategy))
    for key, expected in trained_on_a_mesh(1).items():
        np.testing.assert_array_equal(ours.params[key], expected)


def problem(shares, **sections):
    found = experiment(strategy={**SERVERS, "batch_shares": list(shares)}, **sections)
    pieces = [1] * len(shares)
    return found, ModelProblem(found.program, found.loader, shares, pieces, found.heldout)


@pytest.mark.slow
def test_gradients_of_shares_add_up_to_that_of_the_batch():
    """Weighted by their rows; drawn at random."""
    rng = np.random.default_rng(11)
    for _ in range(3):
        cuts = sorted(rng.choice(np.arange(1, BATCH), 3, replace=False))
        shares = tuple(int(n) for n in np.diff([0, *cuts, BATCH]))
        found, workers = problem(shares)
        params, step = workers.start, int(rng.integers(50))
        parts = [workers.gradient(params, worker, step) for worker in range(4)]
        assert tuple(part.tokens for part in parts) == shares
        whole = found.program.gradients(found.program.init(), found.loader.batch(step))
        for name, expected in flatten_with_names(whole.grads):
            mean = sum(part.gradient[name] * part.tokens for part in parts) / BATCH
            np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-6)


def noisy(**args):
    model = {"type": "import", "path": f"{__name__}:Noisy", "args": args}
    return {"model": model, "loss": {"type": "classification"}}


def test_running_statistics_are_pushed_as_changes():
    """With the opposite sign, so that a step of size 1 against them gives the new statistics."""
    _, workers = problem((8, 8, 8, 8), **noisy(running=True))
    start = workers.start
    (name,) = [name for name in start if name.endswith("/mean")]
    pushed = workers.gradient(start, 0, 0).gradient[name]
    assert np.abs(pushed).max() > 0
    moved = {**start, name: start[name] - pushed}
    again = workers.gradient(moved, 0, 0).gradient[name]
    # The statistics move by a fixed fraction towards those of the batch, which has not changed.
    np.testing.assert_allclose(again, 0.9 * pushed, rtol=0.15, atol=1e-6)


def test_random_layers_draw_anew_for_each_worker_and_step():
    _, workers = problem((8, 8, 8, 8), **noisy())
    params = workers.start

    def gradient(worker, step):
        found = workers.gradient(params, worker, step).gradient
        return np.concatenate([array.ravel() for array in found.values()])

    np.testing.assert_array_equal(gradient(1, 2), gradient(1, 2))
    # The same rows by another worker's number.
    workers._loaders[2] = workers._loaders[1]
    assert np.any(gradient(2, 2) != gradient(1, 2))


def test_the_loss_is_that_of_the_evaluation():
    found, workers = problem((8, 8, 8, 8))
    from jaxdist.train.evaluate import evaluate

    begun = found.program.init()
    with found.heldout.evaluation_batches() as batches:
        expected = evaluate(found.program, begun.params, begun.buffers, batches)
    assert workers.loss(workers.start) == expected["loss"]


def test_without_a_held_out_split():
    found = experiment(strategy=SERVERS)
    shares = cluster_of(found.config).shares(BATCH)
    with pytest.raises(DataError, match="no held-out split"):
        ModelProblem(found.program, found.loader, shares, [1] * 4, None)
