"""What a worker of SSP reads holds all changes of its own, each once: simulated and for real."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_racks import Racked
from live_servers import Faults, FaultyWire, Servers, at_once
from param_server_team import Chaos, Team
from test_simulator import BAD, RATE

from jaxdist.compression import Cast
from jaxdist.param_server.aggregation import Direct, Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP, AdaptiveSSP
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.protocol import client as worker
from jaxdist.param_server.protocol.messages import Acknowledge, Answer, Publish
from jaxdist.param_server.scenario import Crash, Pause, SimulationConfig, Straggler
from jaxdist.simulation.engine.problem import Computed, Sgd
from jaxdist.simulation.engine.run import simulate_training

READS = ["eager", "lazy", "each_clock"]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
WORKERS = 4


class Counting:
    """Each worker's gradient moves a column of its own by a known step, on every server."""

    def __init__(self):
        self.start = {"w": np.zeros((6, WORKERS), np.float32)}
        self.seen = {number: [] for number in range(WORKERS)}

    def gradient(self, params, worker, step):
        own = params["w"][:, worker] / np.float32(RATE / WORKERS)
        self.seen[worker].append((step, own.round(3)))
        found = np.zeros((6, WORKERS), np.float32)
        found[:, worker] = -1.0
        return Computed({"w": found})

    def loss(self, params):
        return 0.0


def simulated(model, *, racks=0, codec=None, **script):
    cluster = Cluster(
        workers=WORKERS,
        servers=3,
        consistency=model,
        placement=Balanced(range_bytes=16),
        aggregation=Racks(size=racks) if racks else Direct(),
        codec=codec,
        error_feedback=False,
        simulation=SimulationConfig(link=BAD, noise=0.4, **script),
    )
    problem = Counting()
    simulate_training(cluster, problem, Sgd(RATE), clocks=9)
    return problem.seen


@pytest.mark.parametrize("racks", [0, 2])
@pytest.mark.parametrize("codec", [None, Cast()], ids=["plain", "coded"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.every(3)
def test_a_simulated_worker_reads_each_of_its_changes_once(reads, codec, racks, seed):
    rng = random.Random(seed)
    seen = simulated(
        SSP(bound=rng.randrange(5), reads=reads),
        racks=racks,
        codec=codec,
        seed=seed,
        stragglers=(Straggler(worker=0, factor=rng.choice([1.0, 3.0])),),
        pauses=(Pause(server=1, at_seconds=0.5, back_seconds=1.0),),
    )
    for found in seen.values():
        assert [step for step, _ in found] == [*range(9)]
        for step, own in found:
            np.testing.assert_allclose(own, step, atol=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_a_simulated_worker_that_comes_back_reads_each_of_its_changes_once(seed):
    """All between two of its gradients is one change, but for where it was away."""
    crash = Crash(worker=1, at_seconds=0.6, back_seconds=1.5)
    seen = simulated(SSP(bound=2), seed=seed, crashes=(crash,))
    for number, found in seen.items():
        steps = np.diff([own for _, own in found], axis=0)
        others = np.abs(steps - 1).max(axis=1) > 0.01
        assert others.sum() <= (number == 1)


@pytest.mark.parametrize("reads", READS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), speeds=st.tuples(*[st.sampled_from([1, 3, 20])] * 3))
def test_a_copy_holds_its_readers_changes_whatever_the_network_does(reads, seed, speeds):
    def ones(w, client, clock):
        return -np.eye(3)[client]

    chaos = Chaos(loses=0.1, copies=0.2, reorders=True)
    for model in SSP(bound=2, reads=reads), AdaptiveSSP(least=1, most=3, reads=reads):
        model = model.model_copy(update={"gradient_weight": "whole"})
        given = {"start": np.zeros(3), "learning_rate": 1.0, "seed": seed, "speeds": speeds}
        found = Team(model, 3, ones, chaos=chaos, **given).run()
        for client, clock, version, _ in found.reads:
            assert found.values[version][client] == clock


def test_what_a_worker_asks_for_and_what_it_does_not():
    """A copy with its own change, which came unasked, is computed from; an older one is not."""
    model = SSP(bound=2, reads="eager")

    def at(*replies):
        state = worker.hear(worker.pull(worker.ClientState(0)).state, Answer(0, 0, 0, 0, 0)).state
        state, _ = worker.push(state)
        for reply in replies:
            state = worker.hear(state, reply).state
        return worker.ready(model, state)

    told, newer = Acknowledge(0, 1, 3), Publish(0, 3, 1)
    assert not at()
    assert not at(told)
    assert not at(newer)  # whether its change is in it is not known before the server has said so
    assert at(told, newer)
    assert at(newer, told)
    assert not at(told, Publish(0, 2, 1))
    assert at(Acknowledge(0, 1, None))  # it is dropped, and never will be in any copy


def count(clients, servers, number, clocks):
    """Push, and look for what was pushed in what is read."""
    with clients as client:
        for clock in range(clocks):
            for read, layout in zip(client.read(), servers.layouts, strict=True):
                mine = slice(number, layout.length, WORKERS)
                assert read[mine].tolist() == [clock] * len(read[mine])
            changes = [np.zeros(layout.length, np.float32) for layout in servers.layouts]
            for change in changes:
                change[number::WORKERS] = -1.0
            client.push(changes)
        client.drain()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reads", READS)
def test_a_worker_reads_each_of_its_changes_once(reads, seed):
    """Through a network that loses, doubles and reorders, with sessions that break."""
    model = SSP(bound=2, reads=reads, gradient_weight="whole")
    with Servers(model, WORKERS) as servers:
        faults, stop, rng = Faults(seed), threading.Event(), random.Random(seed)

        def breaks():
            while not stop.wait(0.05):
                server = rng.choice(servers.servers)
                with server._changed:
                    peers = list(server._peers.values())
                for peer in peers[:1]:
                    peer.close()

        breaker = threading.Thread(target=breaks)
        breaker.start()

        def work(number):
            wires = [FaultyWire(wire, faults) for wire in servers.wires]
            count(servers.client(number, wires=wires, retry=0.02), servers, number, 30)

        try:
            at_once(work, WORKERS)
        finally:
            stop.set()
            breaker.join()


@pytest.mark.parametrize("reads", READS)
@pytest.mark.every(3)
def test_a_worker_of_a_rack_reads_each_of_its_changes_once(reads):
    """A rack pushes the mean of two workers, of which each has a column."""
    model = SSP(bound=2, reads=reads, gradient_weight="whole")
    faults = Faults(7)
    with Racked(
        model, WORKERS, 2, retry=0.02, around=lambda wire: FaultyWire(wire, faults)
    ) as racked:

        def work(number):
            with racked.client(number) as client:
                for clock in range(15):
                    for read in client.read():
                        assert read[number] == clock / 2
                    changes = [np.zeros(one.length, np.float32) for one in racked.layouts]
                    for change in changes:
                        change[number] = -1.0
                    client.push(changes)
                client.drain()

        at_once(work, WORKERS)
