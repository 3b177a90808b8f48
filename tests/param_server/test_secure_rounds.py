"""`strategy.aggregation: {type: secure}`: rounds whose servers see only sums."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from live_servers import Faults, FaultyWire, at_once
from live_training import Training, replay_of
from test_live_training import ordered_sums

from jaxdist.errors import ConfigError, RunError
from jaxdist.param_server.aggregation import PushTraffic, Secure
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.secure import MaskingClient
from jaxdist.secure.masks import SecureError
from jaxdist.secure.rounds import ClientRound, ServerRound, Stage, of_bytes
from jaxdist.simulation.engine.problem import Sgd
from jaxdist.simulation.engine.run import simulate_training
from jaxdist.wire.contract import Wire, WireError

pytest.importorskip("cryptography", reason="the extra secure is not installed")
SECURE = {"consistency": {"type": "bsp"}, "aggregation": {"type": "secure"}}
SGD = {"optim": {"type": "sgd", "momentum": 0.0, "learning_rate": 1.0,
                 "schedule": {"type": "constant"}}}  # fmt: skip


@pytest.mark.full
def test_rounds_apply_the_plain_fixed_point_sum_to_the_bit(tmp_path):
    """The replay adds the encoded changes themselves; the run has them only under masks."""
    run = Training(**SECURE, servers=2, workers=3, batch_shares=[8, 8, 16], log=tmp_path)
    run.run()
    assert not run.failed
    workers = [run.worker(slot) for slot in range(3)]
    found = replay_of(run, workers, tmp_path).run()
    for server, wanted in zip(run.servers, found, strict=True):
        assert server.shard.params.tobytes() == wanted.tobytes()
        assert server.counters.applied == 3 * run.clocks
        pushes = 3 * run.clocks * 8 * server.shard.layout.length
        assert pushes < server.counters.received_bytes < pushes + 3 * run.clocks * 2000
    for worker in workers:
        worker.client.close()


@pytest.mark.full  # The replay above has the same mean.
def test_rounds_have_the_mean_of_plain_rounds():
    run = Training(**SECURE, servers=1, workers=4)
    wanted = ordered_sums(run)
    run.run()
    for found, plain in zip(
        jax.tree.leaves(run.state().params), jax.tree.leaves(wanted.params), strict=True
    ):
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5)


class Team:
    """A server whose clients push constants, and may end at any stage of a round."""

    def __init__(self, workers=3, *, around=lambda wire: wire, **aggregation):
        given = {"aggregation": {"type": "secure", **aggregation}, "consistency": {"type": "bsp"}}
        shares = [32 - workers + 1, *[1] * (workers - 1)]
        self.run = Training(servers=1, workers=workers, sections=SGD, batch_shares=shares, **given)
        (self.server,) = self.run.servers
        self.around = around
        self.clients = {number: self.client(number) for number in range(workers)}

    def client(self, number):
        run = self.run
        wires = [self.around(wire) for wire in run._wires(run.servers)]
        return MaskingClient(number, run.cluster.consistency, run.sharded.layouts, wires,
                             patience=Timeouts(20.0, 0.05), **run.cluster.secure)  # fmt: skip

    def begin(self):
        for client in self.clients.values():
            client.read()

    def gone(self, number):
        """End a client once it has its keys, and those of the others."""
        client = self.clients.pop(number)
        client.wait_until(lambda: all(one.ready for one in client._rounds.values()), "keys")
        client.close()
        self.server.leave(number)

    def push(self, number, value, tokens=1.0):
        length = self.server.shard.layout.length
        self.clients[number].push([np.full(length, value, np.float32)], tokens=tokens)

    def close(self):
        for client in self.clients.values():
            client.close()
        self.server.close()


@pytest.fixture
def team(request):
    found = []

    def begin(*given, **more):
        found.append(Team(*given, **more))
        return found[-1]

    yield begin
    for one in found:
        one.close()


def test_as_many_dropouts_as_allowed_are_survived_and_one_more_ends_the_run(team):
    """The one that takes a place joins with the next round, whose keys it can still be part of."""
    one = team(3)
    before = one.server.shard.params
    one.begin()
    one.gone(2)
    one.server.admit(3)
    one.clients[3] = one.client(3)
    one.push(0, 1.0, tokens=1.0)
    one.push(1, 0.25, tokens=2.0)
    one.begin()
    assert one.server.counters.applied == 2
    np.testing.assert_array_equal(one.server.shard.params, before - np.float32(0.5))
    assert one.clients[3].clock == one.clients[0].clock == 1
    one.gone(3)
    assert not one.run.failed
    one.gone(1)
    one.push(0, 1.0)
    (failed,) = one.run.failed
    assert failed == (
        "secure aggregation: 1 of 3 clients are left in round 1, but 2 are needed, so the sum of "
        "the round stays masked. Continue from the newest checkpoint with --resume, or allow more "
        "dropouts (strategy.aggregation.dropouts)"
    )
    assert one.server.counters.applied == 2  # the last push is not unmasked


@dataclass(frozen=True)
class LateWire:
    """A wire to a server that cannot be reached before an event is set."""

    wire: Wire
    event: threading.Event

    def open(self, hear, ended):
        if not self.event.is_set():
            raise WireError("not yet")
        return self.wire.open(hear, ended)


def test_a_client_that_joins_two_servers_in_different_rounds_holds_up_no_round():
    """Server 0 waits for its push, and server 1 would defer it to a round after that push."""
    run = Training(**SECURE, servers=2, workers=3, sections=SGD, batch_shares=[30, 1, 1])
    event = threading.Event()

    def client(number, wires):
        return MaskingClient(number, run.cluster.consistency, run.sharded.layouts, wires,
                             patience=Timeouts(10.0, 0.05), **run.cluster.secure)  # fmt: skip

    wires = [run._wires(run.servers) for _ in range(4)]
    clients = [client(number, wires[number]) for number in range(3)]
    for one in clients:
        one.read()
    clients[1].wait_until(lambda: all(one.ready for one in clients[1]._rounds.values()), "keys")
    clients[1].close()
    for server in run.servers:
        server.leave(1)
        server.admit(3)
    clients[1] = client(3, [wires[3][0], LateWire(wires[3][1], event)])

    def work(at):
        while clients[at].clock < 6:
            clients[at].read()
            changes = [np.ones(one.shard.layout.length, np.float32) for one in run.servers]
            clients[at].push(changes)
        clients[at].drain()

    def welcome():
        server = run.servers[1]
        while server.round.number < 2:
            time.sleep(0.001)
        deadline = time.monotonic() + 0.2
        while not server.round.begun and time.monotonic() < deadline:
            time.sleep(0.001)
        event.set()

    at_once(lambda at: work(at) if at < 3 else welcome(), 4)
    assert [one.state.clocks.version for one in run.servers] == [6, 6]
    assert not run.failed
    for one in (*clients, *run.servers):
        one.close()


def test_a_client_that_ends_after_its_push_is_in_the_sum(team):
    one = team(3)
    before = one.server.shard.params
    one.begin()
    one.push(2, 4.0)
    deadline = time.monotonic() + 20
    while not any(client == 2 for client, _ in [*one.server._payloads]):
        assert time.monotonic() < deadline, "the push does not arrive"
        time.sleep(0.001)  # a session that is closed loses what is not sent yet
    one.gone(2)
    one.push(0, 1.0)
    one.push(1, 1.0)
    one.begin()
    np.testing.assert_array_equal(one.server.shard.params, before - np.float32(2.0))


def test_pushes_without_tokens_or_with_a_nan_count_for_nothing(team):
    one = team(3)
    before = one.server.shard.params
    one.begin()
    one.push(0, 1.0)
    one.push(1, np.nan, tokens=0.0)
    one.push(2, np.nan)
    one.begin()
    np.testing.assert_array_equal(one.server.shard.params, before - np.float32(1.0))
    assert dict(one.server.counters.dropped) == {
        "the push has no tokens": 1, "the push contains a NaN or an infinity": 1,
    }  # fmt: skip
    for number in range(3):
        one.push(number, np.nan, tokens=0.0)
    one.begin()
    assert one.server.state.clocks.version == 2


def test_a_network_that_loses_doubles_and_reorders_changes_no_sum(team):
    faults = Faults(seed=3)
    one = team(4, around=lambda wire: FaultyWire(wire, faults))
    before = one.server.shard.params

    def work(number):
        for clock in range(12):
            one.clients[number].read()
            one.push(number, number + 4 * clock)
        one.clients[number].drain()

    at_once(work, 4)
    assert min(faults.done.values()) > 5
    moved = np.float32(sum(1.5 + 4 * clock for clock in range(12)))
    np.testing.assert_allclose(one.server.shard.params, before - moved, rtol=1e-6)
    assert not one.run.failed


def test_what_does_not_belong_to_a_round_is_refused(team):
    one = team(3)
    one.clients[0].read()
    link = one.clients[0]._links[0]
    with one.clients[0]._changed:
        one.clients[0]._ask(link, Stage.KEYS, {1: bytes(64)})
    with pytest.raises(
        RunError, match="data for clients 1, which are not exactly the clients of its round"
    ):
        one.clients[0].wait_until(lambda: False, "a refusal")


def test_a_push_without_keys_is_refused(team):
    one = team(3)
    one.begin()
    client = one.clients[1]
    client.wait_until(lambda: all(one.ready for one in client._rounds.values()), "keys")
    one.server.round = ServerRound(0, 3, 2)
    one.push(1, 1.0)
    with pytest.raises(RunError, match="client 1 has not shared its keys in this round"):
        client.drain()


@pytest.mark.parametrize(("stage", "raw"), [(0, b"x"), (4, b""), (1, bytes(8 + 147))])
def test_bytes_that_are_no_message_are_refused(stage, raw):
    with pytest.raises(
        SecureError, match=f"a message of {len(raw)} bytes is not valid in stage {stage}"
    ):
        of_bytes(stage, raw)


def test_an_answer_to_no_request_is_refused():
    with pytest.raises(SecureError, match="sent an answer where none was expected"):
        ClientRound(0, 2).answered(Stage.REVEAL, {})


def test_settings_of_dropouts():
    assert [Secure().needed(n) for n in (2, 3, 4, 5)] == [2, 2, 3, 3]
    assert Secure().racks(range(4)) == ()
    assert Secure().traffic(4, 100) == PushTraffic(800, 0)
    with pytest.raises(ConfigError, match="allow at most 1 dropouts") as caught:
        Secure(dropouts=2).check(4)
    assert caught.value.setting == ("dropouts",)


def test_masks_are_not_simulated():
    cluster = Training(**SECURE, workers=4).cluster
    with pytest.raises(ConfigError, match="secure is not simulated: set direct"):
        simulate_training(cluster, None, Sgd(0.1), clocks=1)
