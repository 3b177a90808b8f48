"""Slow weights against optax and numpy, on every plan, and in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import build_program, place

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.run.checkpoints import restore, save
from jaxdist.train.strategy.lookahead import Lookahead
from jaxdist.trees import flatten_with_names

OPTIM = AdamWConfig(type="adamw", learning_rate=0.1, schedule=ScheduleConfig(type="constant"))
ROWS, STEPS = 8, 7
HALF = Lookahead(steps=3)
NESTEROV = Lookahead(steps=2, learning_rate=0.7, momentum=0.9, nesterov=True)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (3, 5)), dims=("embed", "mlp"))

    def __call__(self, x):
        return x @ self.w[...]


def squares(module, batch):
    each = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((each * batch["weight"]).sum(), batch["weight"].sum())}


def rows(step):
    random = np.random.default_rng(step)
    return {
        "x": random.normal(size=(ROWS, 3)).astype(np.float32),
        "y": random.normal(size=(ROWS, 5)).astype(np.float32),
    }


@cache
def program(devices=1, lookahead: Lookahead | None = HALF, **plan):
    found = build_program(Model, squares, OPTIM, rows(0), {"data": devices}, **plan)
    if lookahead is None:
        return found
    return replace(found, outer=lookahead.outer())


def go(found, state, steps, batch):
    """The state after these steps, exchanged where it is due, as a run does it."""
    for step in steps:
        state, _ = found.train(state, batch(step))
        if found.outer is not None and found.outer.due(step):
            state = found.between(state)
    return state


def trained(found, last=STEPS, state=None, first=1):
    state = found.init() if state is None else state
    return go(found, state, range(first, last + 1), lambda step: place(found, rows(step)))


def weights(found, state):
    used = found.home.used(state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((used.params, used.outer))]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def gradient(w, step):
    def loss(w):
        batch = rows(step)
        return jnp.square(batch["x"] @ w - batch["y"]).sum(-1).mean()

    return jax.grad(loss)(w)


def test_it_is_optax_s_lookahead():
    found = program()
    (start,) = jax.tree.leaves(found.init().params)
    both = optax.LookaheadParams.init_synced(start)
    reference = optax.lookahead(optax.adamw(0.1, weight_decay=0.0), 3, 0.5)
    state = reference.init(both)
    for step in range(1, STEPS + 1):
        updates, state = reference.update(gradient(both.fast, step), state, both)
        both = optax.apply_updates(both, updates)
    fast, slow = weights(found, trained(found))
    np.testing.assert_allclose(fast, both.fast, rtol=1e-5)
    np.testing.assert_allclose(slow, both.slow, rtol=1e-5)
    assert np.abs(fast - slow).max() > 0.01  # step 7 is not the last of three


def test_with_momentum_it_is_sgd_on_what_steps_changed():
    found = program(lookahead=NESTEROV)
    (start,) = jax.tree.leaves(found.init().params)
    adam = optax.adamw(0.1, weight_decay=0.0)
    w, slow, velocity, state = start, np.asarray(start), 0.0, adam.init(start)
    for step in range(1, STEPS + 1):
        updates, state = adam.update(gradient(w, step), state, w)
        w = w + updates
        if step % 2 == 0:
            back = slow - np.asarray(w)
            velocity = 0.9 * velocity + back
            slow = slow - 0.7 * (0.9 * velocity + back)
            w = jnp.asarray(slow)
    fast, ours, moved = weights(found, trained(found))
    for theirs, mine in ((w, fast), (slow, ours), (velocity, moved)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_all_of_the_way_changes_nothing():
    found = program(lookahead=Lookahead(steps=2, learning_rate=1.0))
    plain = program(lookahead=None)
    fast, slow = weights(found, trained(found, 6))
    assert (fast == slow).all()
    np.testing.assert_allclose(fast, weights(plain, trained(plain, 6))[0], rtol=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        *(pytest.param({"zero": n}, marks=pytest.mark.slow) for n in (1, 3)),
        pytest.param({"zero": 1, "reduce": Ring()}, marks=pytest.mark.slow),
        {"zero": 2, "reduce": Ring()},
        {"zero": 3, "reduce": Ring()},
    ],
    ids=str,
)
def test_zero_splits_it_and_changes_nothing(plan):
    """Neither 3 nor 5 divides by 4: zeros fill up the shards."""
    one, found = program(), program(4, **plan)
    state = trained(found)
    for ours, theirs in zip(weights(found, state), weights(one, trained(one)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    (slow,), split = jax.tree.leaves(state.outer.params), "zero" in plan
    assert slow.addressable_shards[0].data.size == (5 if split else 15)
    shapes = jax.tree.leaves(found.state_shapes)
    assert [x.sharding for x in jax.tree.leaves(state)] == [s.sharding for s in shapes]


def stored(path, found, state):
    with CheckpointStore(path, keep=9, keep_best=False, on_event=pytest.fail) as store:
        save(store, found, state)


def loaded(path, found, say=pytest.fail):
    with CheckpointStore(path, keep=9, keep_best=False, on_event=pytest.fail) as store:
        return restore(store, found, say=say).state


def test_a_run_goes_on_to_the_bit_and_on_other_shards(tmp_path):
    found, one = program(4, zero=3), program()
    half = trained(found, 4)
    stored(tmp_path, found, half)
    expected = bits(found.home.used(half))
    assert bits(one.home.used(loaded(tmp_path, one))) == expected
    whole = trained(found)
    assert bits(trained(found, STEPS, loaded(tmp_path, found), 5)) == bits(whole)
    again = trained(one, STEPS, loaded(tmp_path, one), 5)
    for ours, theirs in zip(weights(one, again), weights(found, whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("writer", [None, NESTEROV], ids=["none", "another"])
def test_where_another_saved_it_begins_with_the_saved_parameters(writer, tmp_path):
    first, found, said = program(lookahead=writer), program(4, zero=3), []
    state = trained(first, 4)
    params = bits(state.params)
    stored(tmp_path, first, state)
    state = loaded(tmp_path, found, said.append)
    assert said == [
        "the state of the strategy starts from zero, because "
        "the checkpoint was saved with a different strategy"
    ]
    assert bits(found.home.used(state).params) == bits(found.home.used(state).outer) == params
    trained(found, STEPS, state, 5)


def test_a_plain_run_leaves_it(tmp_path):
    found, plain, said = program(), program(lookahead=None), []
    state = trained(found, 4)
    params = bits(state.params)
    stored(tmp_path, found, state)
    state = loaded(tmp_path, plain, said.append)
    assert (state.outer, bits(state.params), len(said)) == ((), params, 1)


PLANS = {
    "one device": ({"data": 1}, {}),
    "zero 3": ({"data": 2}, {"reduce": {"type": "ring"}, "zero": {"stage": 3, "whole_below": 8}}),
    "a V of stages": ({"stage": 2}, {"pipeline": {"schedule": {"type": "zb_v"}}}),
}


def config(**sections: Any) -> ExperimentConfig:
    given = {
        "model": {"type": "gpt", "layers": 4, "embed": 16, "heads": 2},
        "data": {"type": "synthetic", "kind": "tokens", "window": 8, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 6, "batch_size": 8},
        "strategy": NESTEROV.model_dump(),
        **sections,
    }
    return validate(Document(given), ExperimentConfig)


@cache
def experiment(plan: str) -> Experiment:
    mesh, parallel = PLANS[plan]
    train = {"steps": 6, "batch_size": 8, "microbatches": 4 if "stages" in plan else 1}
    devices = jax.devices()[: next(iter(mesh.values()))]
    return build(config(mesh=mesh, parallel=parallel, train=train), devices=devices)


@pytest.mark.slow
def test_stages_keep_it_in_their_order_and_checkpoints_in_the_model_s(tmp_path):
    """What each plan saves every other one loads to the bit, and goes on as one device does."""
    begun = jax.device_get(experiment("one device").program.init())
    halves: dict[str, Any] = {}
    for plan in PLANS:
        made = experiment(plan)
        found = made.program
        lie = jax.tree.map(lambda struct: struct.sharding, found.state_shapes)
        state = jax.device_put(found.home.stored(jax.tree.map(np.array, begun)), lie)
        with made.loader.batches() as batches:
            state = go(found, state, (1, 2, 3), lambda _, batches=batches: next(batches))
        halves[plan] = jax.device_get(found.home.used(state))
        stored(tmp_path / plan, found, state)
    for writer, reader in (("zero 3", "a V of stages"), ("a V of stages", "one device")):
        made = experiment(reader)
        found = made.program
        state = loaded(tmp_path / writer, found)
        assert bits(found.home.used(state)) == bits(halves[writer])
        with made.loader.batches(3) as batches:
            state = go(found, state, (4,), lambda _, batches=batches: next(batches))
        halves[f"{writer} to {reader}"] = jax.device_get(found.home.used(state))
    one = halves["one device"]
    for plan in PLANS:
        assert_near(halves[plan], one)
    first, second = (half for name, half in halves.items() if " to " in name)
    assert_near(first, second)


def assert_near(ours, theirs):
    for part in ("params", "outer"):
        named = flatten_with_names(getattr(theirs, part))
        for (name, expected), leaf in zip(named, jax.tree.leaves(getattr(ours, part)), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=2e-4, atol=2e-4, err_msg=name)


DIGITS = {
    "model": {"type": "mlp", "hidden": [4]},
    "data": {"type": "images", "source": "digits"},
}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"type": "adamw", "learning_rate": 1e-3, "master_weights": "bfloat16"}},
         "strategy = .* (a config from Python): strategy.type lookahead with "
         ".*optim.master_weights bfloat16: lookahead changes the parameters"),
        ({"strategy": {"type": "lookahead", "nesterov": True}},
         "nesterov has no effect without momentum"),
        ({"strategy": {"type": "lookahed"}}, "lookahead"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(sections, message):
    with pytest.raises(ConfigError) as refused:
        build(config(**DIGITS, **sections))
    told = " ".join(str(refused.value).split())
    assert all(part in told for part in message.split(".*")), told


@pytest.mark.parametrize(
    ("steps", "message"),
    [(6, None), (7, "the last 1 steps of the run do not change the slow weights"),
     (1, "strategy.type lookahead has no effect: the run ends after 1 steps")],
)  # fmt: skip
def test_a_run_that_ends_in_between_is_told(steps, message):
    train = {"steps": steps, "batch_size": 8}
    notices = build(config(**DIGITS, train=train)).notices
    assert bool(notices) == (message is not None)
    assert message is None or message in notices[-1]
