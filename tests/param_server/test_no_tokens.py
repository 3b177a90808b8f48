"""A worker whose examples are all masked pushes 0 tokens: it adds nothing, and nobody waits."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from live_racks import Racked
from live_servers import Servers, at_once
from live_training import Training
from test_simulator import Quadratic, simulated

from jaxdist.models.loss import Mean
from jaxdist.param_server.consistency.arrival import SSP
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.order import ProtocolCall, is_recorded, read_order, step
from jaxdist.param_server.protocol import server
from jaxdist.param_server.protocol.messages import Pull, Push, Stamp
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.replay import Replay
from jaxdist.param_server.training.worker import GradientOnly, LocalSteps, computation
from jaxdist.wire.contract import Spec

CLOCKS = 4


def push_all(client, layouts, tokens):
    """Ones in every clock, or NaN where there are no tokens."""
    while client.clock < CLOCKS:
        weight, _ = tokens(client.number, client.clock), client.read()
        value = 1.0 if weight else np.nan
        client.push([np.full(one.length, value, np.float32) for one in layouts], tokens=weight)
    client.drain()


def second_masked(number, clock):
    return 0.0 if number == 1 or clock == 2 else 2.0


@pytest.mark.parametrize("model", [BSP(), SSP(bound=1, gradient_weight="whole")])
def test_servers_apply_what_has_tokens_and_all_clocks_advance(model):
    with Servers(model, 2) as servers:

        def work(number):
            with servers.client(number) as client:
                push_all(client, servers.layouts, second_masked)

        at_once(work, 2)
        for one in servers.servers:
            assert set(one.shard.params) == {-3.0}
            assert one.state.clocks.clocks == {0: CLOCKS, 1: CLOCKS}
            assert one.counters.dropped == {"the push has no tokens": CLOCKS + 1}
            assert one.counters.applied == 3
            assert not one.counters.refused


def test_a_rack_without_tokens_pushes_none():
    """The second rack has none at all; in clock 2 nobody has."""
    with Racked(BSP(), 4, 2, count=1) as racked:

        def work(number):
            with racked.client(number) as client:
                push_all(client, racked.layouts, lambda n, clock: 2.0 * (n < 1 and clock != 2))

        at_once(work, 4)
        (one,) = racked.root.servers
        assert set(one.shard.params) == {-3.0}
        assert one.counters.dropped == {"the push has no tokens": CLOCKS + 1}
        assert one.state.clocks.version == CLOCKS
        assert not racked.failed


def test_a_loss_with_negative_weights_ends_the_worker_with_the_reason():
    from jaxdist.errors import RunError

    with Servers(SSP(), 1) as servers, servers.client(0) as client:
        client.read()
        zeros = [np.zeros(one.length, np.float32) for one in servers.layouts]
        client.push(zeros, tokens=-3.0)
        with pytest.raises(
            RunError, match=r"-3\.0 tokens are impossible: the weights of a batch add up to 0"
        ):
            client.drain()


@pytest.mark.parametrize("tokens", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_those_of_a_nan(tokens):
    with Servers(BSP(), 1) as servers, servers.client(0) as client:
        changes = [np.ones_like(one) for one in client.read()]
        client.push(changes, tokens=tokens)
        client.drain()
        assert servers.servers[0].counters.dropped == {"the push contains a NaN or an infinity": 1}


@pytest.mark.parametrize("tokens", [0.0, np.nan, np.inf])
def test_a_push_that_servers_drop_keeps_what_a_codec_left_out(tokens):
    """The encoder, which would send what it left out before, is not called."""
    with Servers(BSP(), 1) as servers, servers.client(0) as client:
        spec = Spec(0, np.dtype(np.uint8), 5)
        client._encoders = [SimpleNamespace(codes=SimpleNamespace(spec=spec))]
        written, usable = client._written(0, np.ones(3, np.float32), tokens)
        assert (written.tolist(), written.dtype, usable) == ([0] * 5, np.uint8, tokens == 0)


MODELS = [BSP(), SSP(bound=1), Elastic(every=2), Decoupled(local_steps=2)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.type)
def test_a_simulated_worker_without_tokens_holds_nobody_up(model):
    class Masked(Quadratic):
        def gradient(self, params, worker, step):
            found = super().gradient(params, worker, step)
            if worker != 1:
                return found
            nothing = {name: array * np.nan for name, array in found.gradient.items()}
            return found._replace(gradient=nothing, tokens=0.0)

    found = simulated(model, problem=Masked(noise=0.0), steps=6)
    steps = 6 * getattr(model, "every", 1) * getattr(model, "local_steps", 1)
    assert [one.gradients for one in found.work] == [steps] * 3
    assert all(np.isfinite(array).all() for array in found.params.values())
    assert abs(found.params["w"]).max() < 1  # the others have trained
    if model.type != "elastic":  # whose worker is still pulled towards the centre
        assert found.dropped == {"the push has no tokens": 6}


@pytest.fixture
def masked_slot(monkeypatch):
    """Slot 1 computes with no tokens in odd clocks, and then 0/0."""

    def without(found):
        loss = found.sums["loss"]
        sums = {**found.sums, "loss": Mean(loss.total * 0, loss.weight * 0)}
        return found._replace(sums=sums, grads=jax.tree.map(lambda x: x * np.nan, found.grads))

    gradient = GradientOnly.compute

    def compute(self, batches, clock):
        changes, sums = gradient(self, batches, clock)
        if self.slot != 1 or clock % 2 == 0:
            return changes, sums
        loss = sums["loss"]
        nothing = Mean(loss.total * 0, loss.weight * 0)
        return [one * np.nan for one in changes], {**sums, "loss": nothing}

    monkeypatch.setattr(GradientOnly, "compute", compute)
    local = LocalSteps.compute

    def masked(self, batches, clock):
        if self.slot != 1 or clock % 2 == 0:
            return local(self, batches, clock)
        whole = self.program

        class Program:
            state_shapes, update = whole.state_shapes, whole.update

            @staticmethod
            def gradients(state, batch):
                return without(whole.gradients(state, batch))

        self.program = Program
        try:
            return local(self, batches, clock)
        finally:
            self.program = whole

    monkeypatch.setattr(LocalSteps, "compute", masked)


@pytest.mark.parametrize(
    ("model", "codec"),
    [
        ({"type": "bsp"}, {"type": "sign"}),
        pytest.param({"type": "ssp", "bound": 1}, None, marks=pytest.mark.slow),
        pytest.param({"type": "decoupled", "local_steps": 3}, None, marks=pytest.mark.full),
    ],
    ids=["bsp-sign", "ssp", "decoupled"],
)
@pytest.mark.full
def test_a_run_with_masked_batches_trains_and_is_replayed(model, codec, tmp_path, masked_slot):
    """With a codec, what it left out before is neither sent nor lost with a push of no tokens."""
    run = Training(consistency=model, codec=codec, servers=2, log=tmp_path)
    run.run()
    for one in run.servers:
        assert np.isfinite(one.shard.params).all()
        assert set(one.state.clocks.clocks.values()) == {run.clocks}
        assert one.counters.dropped == {"the push has no tokens": run.clocks // 2}
    workers, steps = [run.worker(slot) for slot in range(2)], run.cluster.local_steps
    again = Replay(
        run.sharded,
        run.sharded.parted(run.start, 0),
        [RangeState(Clocks(2))] * 2,
        [read_order(tmp_path / f"server_{at}.jsonl") for at in range(2)],
        lambda client: computation(run.sharded, workers[client].program, client),
        lambda client, clock: [
            workers[client].loader.batch(clock * steps + step) for step in range(steps)
        ],
        due=run.clocks,
    )
    for found, server_ in zip(again.run(), run.servers, strict=True):
        assert found.tobytes() == server_.shard.params.tobytes()
    for one in workers:
        one.client.close()


def test_a_log_does_not_grow_while_nothing_happens():
    """Retries that wait or are answered again, refusals, and ticks to which nothing is due."""
    model, state = BSP(), RangeState(Clocks(2))
    for client in 0, 1:
        state = server.join(model, state, client).state
    pull, push = Pull(Stamp(0, 0, 1)), Push(Stamp(0, 0, 0), 0, 0)
    recorded = []
    taken = [push, pull, push, pull, pull, Pull(Stamp(0, 9, 0)), None, Push(Stamp(0, 1, 0), 0, 0)]
    for message in [*taken, push, push]:
        one = (
            ProtocolCall("receive", 0.0, message=message) if message else ProtocolCall("tick", 1.0)
        )
        found = step(model, state, one)
        recorded.append(is_recorded(state, found))
        state = found.state
    assert recorded == [True, True] + [False] * 5 + [True] + [False] * 2
