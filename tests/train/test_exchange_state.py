"""An exchange that carries state: sums in bfloat16 with what rounding left, device by device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from programs import build_program, place

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.parallel.exchange.all_reduce import AllReduce
from jaxdist.run.checkpoints import adapted

OPTIM = AdamWConfig(type="adamw", learning_rate=0.1, skip_nonfinite=True)
ROWS = 8


@dataclass(frozen=True)
class Rounded(AllReduce):
    """Gradients are sent rounded; what that left out is added to the next step's."""

    def init(self, params: Any) -> Any:
        count = self.mesh.shape["data"]
        return jax.tree.map(lambda p: jnp.zeros((count, *p.shape), jnp.float32), params)

    def state_shardings(self, state: Any) -> Any:
        return jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec(self.axes)), state)

    def reshard(self, saved: Any, state: Any) -> Any:
        """The sum over devices stays, in equal parts."""
        return jax.tree.map(lambda x, s: jnp.broadcast_to(x.sum(0) / len(s), s.shape), saved, state)

    def gradients(self, compute, held, state):
        found = self.stacked(compute, held)
        wanted = jax.tree.map(jnp.add, found.grads, state)
        sent = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), wanted)
        left = jax.tree.map(jnp.subtract, wanted, sent)
        return found._replace(grads=self.mean(sent, found.sums["loss"].weight)), left


class Counted(AllReduce):
    """Its state is one bare array: how many exchanges there were."""

    def init(self, params):
        return jnp.int32(0)

    def gradients(self, compute, held, state):
        found, _ = super().gradients(compute, held, ())
        return found, state + 1


class Model(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (3, 5)), dims=("embed", "mlp"))

    def __call__(self, x):
        return x @ self.w[...]


def squares(module, batch):
    each = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((each * batch["weight"]).sum(), batch["weight"].sum())}


def rows(seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(ROWS, 3)).astype(np.float32),
        "y": random.normal(size=(ROWS, 5)).astype(np.float32),
    }


def program(devices, stateful=True, kind=Rounded, optim=OPTIM, **plan):
    plan = {"reduce": Ring(), **plan}
    found = build_program(Model, squares, optim, rows(), {"data": devices}, **plan)
    if not stateful:
        return found
    own = found.exchange
    given = {"axes": own.axes, "algorithm": own.algorithm}
    return replace(found, exchange=kind(own.whole, own.zero, **given))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trained(found, steps, state=None, begin=0):
    state = found.init() if state is None else state
    for step in range(begin, begin + steps):
        state, _ = found.train(state, place(found, rows(step)))
    return state


def test_each_device_has_its_own_and_nothing_is_lost():
    """What is sent and what is left are what there was, to the bit, and all devices differ."""
    found, exact = program(8), program(8, stateful=False)
    state = trained(found, 3)
    (left,) = jax.tree.leaves(state.exchange)
    assert [shard.data.shape for shard in left.addressable_shards] == [(1, 3, 5)] * 8
    batch = place(found, rows(9))
    ours = found.gradients(state, batch)
    plain = exact.gradients(replace(state, exchange=()), batch)
    total = jax.tree.leaves(ours.grads)[0] * ROWS + jax.tree.leaves(ours.exchange)[0].sum(0)
    np.testing.assert_allclose(total, jax.tree.leaves(plain.grads)[0] * ROWS + left.sum(0), 1e-5)
    (after,) = jax.tree.leaves(ours.exchange)
    assert len({shard.data.tobytes() for shard in map(np.asarray, after)}) == 8
    assert np.abs(after).max() > 0


def test_a_skipped_step_keeps_it():
    found = program(8)
    state = trained(found, 2)
    before = bits(state.exchange)
    bad = {**rows(5), "x": np.full((ROWS, 3), np.nan, np.float32)}
    state, _ = found.train(state, place(found, bad))
    assert bits(state.exchange) == before


@pytest.fixture
def saved(tmp_path):
    found = program(8)
    state = trained(found, 3)
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(3, state, metadata={})
    return tmp_path, bits(state), state


def restored(directory, found, say=pytest.fail):
    with CheckpointStore(directory, keep=1, keep_best=False, on_event=pytest.fail) as store:
        return store.restore_as(adapted(found, say)).state


@pytest.mark.full
def test_it_is_saved_and_goes_on_to_the_bit(saved):
    directory, expected, _ = saved
    found = program(8)
    state = restored(directory, found)
    assert bits(state) == expected
    assert bits(trained(found, 2, state, 3)) == bits(trained(found, 5))


def test_another_number_of_devices_shares_the_same_sum(saved):
    directory, _, old = saved
    found = program(4)
    state = restored(directory, found)
    (before,), (after,) = map(jax.tree.leaves, (old.exchange, state.exchange))
    assert (after.shape, after.sharding.spec) == ((4, 3, 5), PartitionSpec(("data",)))
    np.testing.assert_allclose(after.sum(0), before.sum(0), rtol=1e-6)
    assert bits(state.params) == bits(old.params)
    trained(found, 1, state)


def test_a_state_of_one_bare_array_is_restored_and_left(tmp_path):
    found = program(8, kind=Counted)
    state = trained(found, 3)
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(3, state, metadata={})
    assert int(restored(tmp_path, program(4, kind=Counted)).exchange) == 3
    said = []
    assert restored(tmp_path, program(4, stateful=False), said.append).exchange == ()
    assert len(said) == 1


@pytest.mark.full
def test_an_exchange_without_leaves_it_and_one_with_begins_anew(saved, tmp_path):
    directory, _, old = saved
    said = []
    plain = program(8, stateful=False)
    state = restored(directory, plain, said.append)
    assert (state.exchange, bits(state.params)) == ((), bits(old.params))
    state = trained(plain, 1, state, 3)
    with CheckpointStore(tmp_path / "x", keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(4, state, metadata={})
    found = program(8)
    state = restored(tmp_path / "x", found, said.append)
    assert not np.asarray(jax.tree.leaves(state.exchange)[0]).any()
    assert [line.split(",")[0] for line in said] == [
        "the state of the gradient exchange starts from zero"
    ] * 2


@pytest.mark.full
def test_counters_of_skipped_steps_come_and_go(saved, tmp_path):
    """As where a run goes on with messages, which count by themselves, or without them."""
    directory, _, old = saved
    plain = program(8, stateful=False, optim=OPTIM.model_copy(update={"skip_nonfinite": False}))
    state = restored(directory, plain, lambda line: None)
    assert bits((state.params, state.opt_state)) == bits((old.params, old.opt_state.inner))
    state = trained(plain, 1, state, 3)
    with CheckpointStore(tmp_path / "x", keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(4, state, metadata={})
    again = restored(tmp_path / "x", program(8, stateful=False), lambda line: None)
    assert bits(again.opt_state.inner) == bits(state.opt_state)
    assert (int(again.opt_state.skipped), int(again.opt_state.consecutive)) == (0, 0)
    trained(program(8, stateful=False), 1, again, 4)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"reduce": None}, marks=pytest.mark.slow),
        {"reduce": None, "zero": 1, "microbatches": 2},
        pytest.param({"reduce": None, "zero": 3}, marks=pytest.mark.full),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"zero": 1}, marks=pytest.mark.slow),
        {"zero": 2, "microbatches": 2},
        pytest.param({"zero": 3}, marks=pytest.mark.full),
        "stateful",
    ],
    ids=str,
)
@pytest.mark.parametrize("devices", [4])
@pytest.mark.every(3)
def test_gradients_and_update_are_train(plan, devices):
    """Also where shards are filled up: neither 3 nor 5 divides by 4."""
    found = program(devices) if plan == "stateful" else program(devices, stateful=False, **plan)
    batch = place(found, rows())
    whole, metrics = found.train(found.init(), batch)
    state = found.init()
    state, found_metrics = found.update(state, found.gradients(state, batch))
    for ours, expected in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        assert ours.sharding.is_equivalent_to(expected.sharding, ours.ndim)
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found_metrics, metrics, rtol=2e-6)
