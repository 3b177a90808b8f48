"""Models with running statistics on servers: a second kind of push, averaged by examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from live_training import Training

from jaxdist.train.state import TrainState
from jaxdist.train.step import StepGradients
from jaxdist.train.strategy.statistics import averaging
from jaxdist.trees import flatten_with_names

RESNET = {
    "model": {"type": "resnet", "blocks": [1], "width": 4, "stem": "cifar"},
    "optim": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "train": {"steps": 3, "batch_size": 32},
}


def averaged(run: Training) -> TrainState:
    """The same steps in one place: gradients and statistics of the workers, by their examples."""
    program, shares = run.experiment.program, run.cluster.shares(32)
    weights = [share / 32 for share in shares]
    parts = [run.worker(slot) for slot in range(len(shares))]
    streams = [part.loader.batches() for part in parts]
    state = run.start
    for _ in range(run.experiment.total_steps):
        found = [
            part.program.gradients(state, next(stream))
            for part, stream in zip(parts, streams, strict=True)
        ]
        mean = [
            jax.tree.map(lambda *leaves: np.tensordot(weights, np.stack(leaves), 1), *trees)
            for trees in zip(*[(one.grads, one.buffers) for one in found], strict=True)
        ]
        state, _ = program.update(state, StepGradients(mean[0], found[0].sums, mean[1], ()))
    for part, stream in zip(parts, streams, strict=True):
        part.client.close()
        stream.close()
    return state


def assert_close(found: Any, wanted: Any) -> None:
    for (name, a), (_, b) in zip(
        flatten_with_names(found), flatten_with_names(wanted), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.full
def test_servers_average_statistics_by_examples() -> None:
    """A worker that is three times as slow has 8 of 32 examples."""
    speeds = {"batch_shares": "by_speed", "simulation": {"step_seconds": [0.3, 0.1]}}
    run = Training(consistency={"type": "bsp"}, sections=RESNET, servers=2, **speeds)
    assert run.cluster.shares(32) == (8, 24)
    wanted = averaged(run)
    begun = jax.tree.map(np.asarray, run.start.buffers)
    run.run()
    found = run.state()
    assert_close(found.params, wanted.params)
    assert_close(found.buffers, wanted.buffers)
    assert_close(found.opt_state, wanted.opt_state)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found.buffers, begun)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.parametrize(
    "model",
    [
        {"type": "decoupled", "local_steps": 2},
        pytest.param({"type": "elastic", "every": 2}, marks=pytest.mark.slow),
        pytest.param({"type": "async"}, marks=pytest.mark.slow),
    ],
    ids=lambda model: model["type"],
)
@pytest.mark.full
def test_variances_stay_positive(model: dict[str, Any]) -> None:
    """An outer momentum, or a learning rate, would carry them beyond what workers measured."""
    sections = {**RESNET, "optim": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0}}
    sections["train"] = {"steps": 8, "batch_size": 32}
    run = Training(consistency=model, sections=sections, servers=2)
    run.run()
    for name, leaf in flatten_with_names(run.state().buffers):
        assert np.isfinite(leaf).all(), name
        assert "var" not in name or np.all(np.asarray(leaf) > 0), name


def test_only_parameters_have_optimizer_state() -> None:
    """A server whose ranges are all statistics has none."""
    keys = {"mean", "var"}
    both = averaging(optax.with_extra_args_support(optax.adam(0.1)), keys)
    tree = {"kernel": jnp.ones(2), "mean": jnp.zeros(2), "var": jnp.ones(2)}
    state = both.init(tree)
    assert {x.shape for x in jax.tree.leaves(state)} == {(), (2,)}
    assert len(jax.tree.leaves(state)) == 3
    pushed = {"kernel": jnp.ones(2), "mean": jnp.full(2, -0.5), "var": jnp.full(2, 0.25)}
    moved, _ = both.update(pushed, state, tree)
    new: Any = optax.apply_updates(tree, moved)
    np.testing.assert_allclose(new["kernel"], 0.9, rtol=1e-5)
    np.testing.assert_array_equal(new["mean"], [0.5, 0.5])
    np.testing.assert_array_equal(new["var"], [0.75, 0.75])
    alone = {name: tree[name] for name in keys}
    assert jax.tree.leaves(both.init(alone)) == []
    moved: Any
    moved, _ = both.update({name: pushed[name] for name in keys}, (), alone)
    assert set(dict(moved)) == keys


def test_a_run_continues_with_its_statistics() -> None:
    """Shards of a state are joined to the same state."""
    run = Training(consistency={"type": "bsp"}, sections=RESNET, servers=3)
    buffers = jax.tree.map(lambda leaf: leaf + 0.5, run.start.buffers)
    state = replace(run.start, buffers=buffers)
    joined = run.sharded.whole(run.sharded.parted(state, 0), run.start, 0)
    assert_close(joined.buffers, buffers)
    assert_close(joined.params, state.params)
