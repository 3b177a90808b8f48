"""Aggregators that run in this process: the same sums, less into the servers, everything once."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from live_racks import Racked
from live_servers import Faults, FaultyWire, Servers, at_once
from live_training import Training, replay_of
from test_live_kills import until
from test_live_servers import delta
from test_simulator import Quadratic

from jaxdist.errors import ConfigError, RunError
from jaxdist.param_server.aggregation import Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.layout import joined_shards
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.protocol.messages import Answer
from jaxdist.param_server.training.worker import computation
from jaxdist.simulation.engine.problem import Computed, Sgd
from jaxdist.simulation.engine.run import simulate_training
from jaxdist.wire import ports

WHOLE = Asynchronous(gradient_weight="whole")
STEPS = 6


def train(client, layouts, clocks, of=delta):
    while client.clock < clocks:
        client.read()
        client.push([of(client.number, client.clock, layout.length) for layout in layouts])
    client.drain()


def together(servers, workers, clocks=STEPS):
    """All workers of servers, or of racks."""

    def work(number):
        with servers.client(number) as client:
            train(client, servers.layouts, clocks)

    at_once(work, workers)


def params(servers):
    return [server.shard.params for server in servers.servers]


@pytest.mark.parametrize(("workers", "size"), [(4, 2), (8, 4)])
@pytest.mark.every(2)
def test_the_servers_receive_less_by_the_size_of_a_rack(workers, size):
    """And the parameters are those of a run without racks, to the bit: sums are of whole numbers,
    and means of a power of two.
    """
    with Servers(BSP(), workers, rpc=True) as plain:
        together(plain, workers)
        wanted = params(plain)
        before = [server.counters.received_bytes for server in plain.servers]
    with Racked(BSP(), workers, size, rpc=True) as racked:
        together(racked, workers)
        found = params(racked.root)
        received = [server.counters.received_bytes for server in racked.root.servers]
        for (first, *_), shard in zip(zip(*racked.aggregators, strict=True), received, strict=True):
            assert first.stats()["received_bytes"] * workers == size * size * shard
            assert first.stats()["forwarded"] == STEPS
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]
    bytes_of = [layout.spec.size_bytes for layout in racked.layouts]
    assert received == [workers // size * STEPS * one for one in bytes_of]
    assert before == [size * one for one in received]


@pytest.mark.parametrize("rpc", [False, True], ids=["local", "rpc"])
@pytest.mark.every(2)
def test_exactly_once_through_a_network_that_loses_doubles_and_reorders(rpc):
    """On both sides of the aggregators, until each edge has seen many messages."""
    faults = Faults(seed=7)
    around = lambda wire: FaultyWire(wire, faults)  # noqa: E731
    with Racked(WHOLE, 4, 2, rpc=rpc, around=around, retry=0.02, count=1) as racked:
        together(racked, 4, clocks=60)
        (server,) = racked.root.servers
        assert min(faults.done.values()) > 20
        assert server.counters.applied == 2 * 60
        total = np.zeros(server.shard.layout.length, np.float32)
        for worker in range(4):
            for clock in range(60):
                total += delta(worker, clock, len(total)) / 2
        assert server.shard.params.tobytes() == (-total + 0.0).tobytes()
        assert not server._payloads
        for (one,) in racked.aggregators:
            assert not one._payloads
            assert one.forwarded == 60
    assert not racked.failed


def test_the_others_go_on_without_a_worker_and_with_the_next():
    with Racked(BSP(), 4, 2) as racked:
        first, lost, *others = (racked.client(number) for number in range(4))
        for client in (first, lost, *others):
            client.push([one * 0 + 1 for one in client.read()])
        for client in (first, *others):
            client.push([one * 0 + 1 for one in client.read()])
        lost.read()  # it dies before its push
        lost.close()
        racked.leave(1, rack=0)
        racked.admit(4, rack=0)
        for client in (first, *others):
            client.read()
        with racked.client(4, rack=0) as new:
            new.read()
            assert new.clock == first.clock == 2
            for client in (first, new, *others):
                client.push([one * 0 + 1 for one in client.read()])
                client.close()
        assert not racked.gone


def test_a_rack_that_all_leave_is_not_waited_for_and_comes_back_where_the_others_are():
    with Racked(BSP(), 4, 2) as racked:
        ended = threading.Event()

        def others(number):
            with racked.client(number) as client:
                train(client, racked.layouts, 6)
                ended.wait(30)
                train(client, racked.layouts, 8)

        def dies(number):
            with racked.client(number) as client:
                train(client, racked.layouts, 2)
                client.read()
            racked.leave(number, rack=0)

        def back():
            for server in racked.root.servers:
                with server._changed:
                    assert server._changed.wait_for(lambda: server.state.clocks.floor == 6, 30)  # noqa: B023
            assert sorted(racked.gone) == [(0, 0), (1, 0)]
            racked.admit(4, rack=0)
            with racked.client(4, rack=0) as client:
                client.read()
                assert client.clock == 6
                ended.set()
                train(client, racked.layouts, 8)

        works = [lambda: dies(0), lambda: dies(1), lambda: others(2), lambda: others(3), back]
        at_once(lambda at: works[at](), len(works))
        for server in racked.root.servers:
            assert server.state.members == (1, 2)
            assert server.state.clocks.version == 8
            assert server.counters.applied == 2 * 2 + 4 + 2 * 2
    assert not racked.failed


def test_a_nan_of_one_worker_leaves_the_rest_of_its_rack():
    def of(number, clock, length):
        bad = (clock == 1 and number == 1) or (clock == 2 and number > 1)
        return np.full(length, np.nan if bad else 1, np.float32)

    with Racked(BSP(), 4, 2, count=1) as racked:

        def work(number):
            with racked.client(number) as client:
                train(client, racked.layouts, 4, of)

        at_once(work, 4)
        (server,) = racked.root.servers
        assert server.shard.params.tolist() == [-4.0] * server.shard.layout.length
        assert server.counters.dropped == {"the push contains a NaN or an infinity": 1}
        assert [one.stats()["dropped"] for (one,) in racked.aggregators] == [1, 2]


@pytest.mark.full
def test_who_is_late_is_named():
    with Racked(BSP(), 4, 2, count=1) as racked:
        given = {"deadline": 1.0}
        with racked.client(0, **given) as first, racked.client(1, **given) as second:
            first.push([one * 0 for one in first.read()])
            with pytest.raises(RunError, match=r"aggregator 0 of server 0 waits for clients 1 "):
                first.read()
            second.push([one * 0 for one in second.read()])
            with pytest.raises(RunError, match=r"aggregator 0 of server 0 waits for server 0 "):
                first.read()


def test_what_a_server_refuses_ends_the_rack():
    with Racked(BSP(), 4, 2, count=1) as racked:
        racked.root.servers[0].leave(0)
        until(lambda: racked.failed)
        reason = "client 0 has left: use a number that was never used"
        assert racked.failed[0] == f"server 0 refused a message: {reason}"


class Narrow(Quadratic):
    """In float32, as servers have it."""

    start = {"w": np.ones((6, 2), np.float32), "b": np.ones(3, np.float32)}  # noqa: RUF012

    def gradient(self, params, worker, step):
        found = super().gradient(params, worker, step)
        narrow = {name: np.asarray(g, np.float32) for name, g in found.gradient.items()}
        return Computed(narrow, found.tokens)


@pytest.mark.parametrize(("workers", "size"), [(4, 2), (5, 2)])
def test_rounds_have_the_bits_of_the_simulated_run(workers, size):
    """Of racks that are even, and of a last one that is smaller; rate 1, as that of `Servers`."""
    problem = Narrow(noise=0.1)
    cluster = Cluster(workers=workers, servers=2, consistency=BSP(),
                      placement=Balanced(range_bytes=48), aggregation=Racks(size=size))  # fmt: skip
    wanted = simulate_training(cluster, problem, Sgd(1.0), clocks=STEPS)
    shapes = {name: array.shape for name, array in problem.start.items()}
    with Racked(BSP(), workers, size, params=problem.start) as racked:

        def work(number):
            with racked.client(number) as client:
                while client.clock < STEPS:
                    now = joined_shards(racked.layouts, client.read(), shapes)
                    found = problem.gradient(now, number, client.clock).gradient
                    client.push([layout.flatten(found) for layout in racked.layouts])
                client.drain()

        at_once(work, workers)
        found = racked.root.params_now()
    for name, array in wanted.params.items():
        assert np.asarray(array, np.float32).tobytes() == found[name].tobytes(), name


FULL, SLOW = pytest.mark.full, pytest.mark.slow
MODELS = [
    pytest.param({"type": "bsp", "backups": 1}, id="backups", marks=SLOW),
    pytest.param({"type": "ssp", "bound": 1}, id="ssp", marks=SLOW),
    pytest.param({"type": "ssp", "bound": 2, "reads": "ahead"}, id="ahead"),
    pytest.param({"type": "async", "delay_compensation": {"decay": 0.9}}, id="async", marks=FULL),
    pytest.param({"type": "adaptive", "least": 1, "most": 3}, id="adaptive", marks=SLOW),
    pytest.param({"type": "decoupled", "local_steps": 3}, id="decoupled", marks=FULL),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.full
def test_every_model_that_goes_with_racks_lowers_the_loss(model):
    sections = {
        "optim": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0},
        "train": {"steps": 24, "batch_size": 32},
    }
    racks = {"aggregation": {"type": "racks", "size": 2}}
    run = Training(consistency=model, sections=sections, servers=2, workers=4, **racks)
    run.run()
    losses = [sums["loss"][0] / sums["loss"][1] for sums in run.measured]
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    for server in run.servers:
        pushed = server.counters.applied + sum(server.counters.dropped.values())
        least = 1 if "backups" in model else 2  # a rack that is late goes on with the open round
        assert least * run.clocks <= pushed <= 2 * run.clocks
        assert not server.counters.refused


SIGN = {"type": "sign"}
REPLAYS = [
    pytest.param({"type": "ssp", "bound": 2, "reads": "ahead"}, SIGN, id="ahead-sign"),
    pytest.param({"type": "bsp", "backups": 1}, SIGN, id="backups-sign", marks=FULL),
    pytest.param(*MODELS[3].values, None, id="async", marks=FULL),
    pytest.param(*MODELS[5].values, SIGN, id="decoupled-sign", marks=SLOW),
]


def assert_replayed(run, workers, folder):
    """The replay has the bits of the servers, at the end and where they last saved."""
    again = replay_of(run, workers, folder)
    wanted = [server.shard.params for server in run.servers]
    assert [one.tobytes() for one in again.run()] == [one.tobytes() for one in wanted]
    for server, found in enumerate(again.reached):
        saved = run.reached[server]
        assert found.version == saved.version
        pairs = zip(*map(jax.tree.leaves, (found.optimizer, saved.optimizer)), strict=True)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
        assert found.params.tobytes() == saved.params.tobytes()
    for worker in workers:
        worker.client.close()


@pytest.mark.parametrize(("model", "codec"), REPLAYS)
def test_a_run_with_racks_is_replayed_from_its_logs_to_the_same_bits(model, codec, tmp_path):
    """Racks of two and of one: both encode again what they send, and carry what they left out."""
    run = Training(tmp_path, {"train": {"steps": 6, "batch_size": 32}}, consistency=model,
                   codec=codec, workers=3, batch_shares=[8, 8, 16], servers=2,
                   aggregation={"type": "racks", "size": 2})  # fmt: skip
    run.run()
    assert_replayed(run, [run.worker(slot) for slot in range(3)], tmp_path)


def test_a_repeated_answer_has_the_parameters_of_the_first():
    """So that the worker has computed from the version that a replay takes."""
    with Racked(BSP(), 4, 2, count=1) as racked, racked.client(0) as client:
        one, newer = racked.aggregators[0][0], client.read()[0] + 1
        first = one._link.copy
        one._link.copy = newer
        assert one._copy_for(Answer(0, 0, 0, 0, 0)) is first
        assert one._copy_for(Answer(0, 2, 1, 1, 1)) is newer


def test_a_replay_of_racks_with_replaced_workers(tmp_path):
    """Worker 0 dies when only server 0 has its last push, and worker 2 was alone in its rack."""
    run = Training(tmp_path, consistency={"type": "bsp"}, workers=3, servers=2,
                   batch_shares=[8, 8, 16], aggregation={"type": "racks", "size": 2})  # fmt: skip
    first = [run.worker(slot, stop=2) for slot in range(3)]
    at_once(lambda slot: first[slot].run(), 3)

    client = first[0].client
    work = computation(run.sharded, first[0].program, 0)
    work.begin(client.read())
    changes, _ = work.compute([first[0].loader.batch(2)], 2)
    client._push_to(0, changes[0], client._read[0], 8.0)
    until(lambda: run.racks[0][0].state.inner.inboxes[0].expected == 6)
    for slot in 0, 2:
        first[slot].client.close()
        run.leave(slot, slot)
        for one in run.racks[slot // 2]:
            one.admit(slot + 3)
    then = {1: first[1], 3: run.worker(0, number=3), 5: run.worker(2, number=5)}
    for number in 3, 5:
        then[number].client.read()
    first[1].stop = run.clocks

    def finish(slot):
        number = (3, 1, 5)[slot]
        then[number].run()
        then[number].client.close()
        run.leave(number, slot)

    at_once(finish, 3)
    run.close()
    assert [server.counters.applied for server in run.servers] == [2 * run.clocks] * 2
    assert_replayed(run, [*first, then[3], first[0], then[5]], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [None, pytest.param({"type": "sign"}, marks=FULL)], ids=["whole", "sign"]
)
def test_rounds_with_racks_are_those_without_but_for_rounding(codec):
    """With a codec they are others: what racks forward is coded again, in the bytes of a push."""
    racks = {"aggregation": {"type": "racks", "size": 2}}
    given = {"consistency": {"type": "bsp"}, "workers": 4, "servers": 2, "codec": codec}
    plain, racked = Training(**given), Training(**given, **racks)
    plain.run()
    racked.run()
    for a, b in zip(plain.servers, racked.servers, strict=True):
        assert a.counters.received_bytes == 2 * b.counters.received_bytes
        if codec is None:
            np.testing.assert_allclose(b.shard.params, a.shard.params, rtol=1e-4, atol=1e-5)


def test_what_a_run_with_racks_needs_and_cannot_do(monkeypatch):
    with pytest.raises(ConfigError, match=r"1 servers and 2 aggregators .* need ports up to 65536"):
        ports.check_ports("127.0.0.1", 65534, 1, aggregators=2)
    monkeypatch.setattr(ports, "_refused", lambda host, port: "taken" if port == 7003 else None)
    with pytest.raises(ConfigError, match=r"aggregator 0 cannot listen .* port 7003: taken"):
        ports.check_ports("127.0.0.1", 7000, 2, aggregators=2)
