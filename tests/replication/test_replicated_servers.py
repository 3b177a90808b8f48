"""Replicated servers over real wires: in threads, and as processes that are killed."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

from benchmarks.param_server.local_wire import LocalWire
from benchmarks.param_server.pusher import delta, layout_of
from benchmarks.param_server.replicated import killed
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import RangeView
from jaxdist.replication.seat import Arbiter, Seat
from jaxdist.wire.contract import Wire, WireError
from jaxdist.wire.frames import spec_for

LENGTH = 64
WHOLE = Asynchronous(gradient_weight="whole")


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Threads:
    """The seats of a range in this process; what is killed hears and says nothing any more."""

    def __init__(self, model, workers):
        self.model, self.workers = model, workers
        self.layout = layout_of(LENGTH)
        self.seats: dict[int, Seat] = {}
        self.services: list[Any] = []
        self.dead: set[int] = set()
        self.clients: list[Client] = []
        self.lock = threading.RLock()
        self.orders = ThreadPoolExecutor(1)
        self.arbiter = Arbiter(0, 0, self.tell)
        for _ in range(2):
            self.start()
        until(lambda: self.arbiter.safe)

    def start(self):
        number = len(self.seats)
        adam = optax.with_extra_args_support(optax.adam(0.1))
        sgd = optax.with_extra_args_support(optax.sgd(1.0))
        transform = sgd if self.model is WHOLE else adam
        shard = ServerShard(self.layout, self.model, transform, np.zeros(LENGTH, np.float32))
        given = {
            "opens": partial(self.opened, number),
            "wire_to": self.wire,
            "say": partial(self.heard, number),
        }
        state = RangeState(Clocks(self.workers)) if number == 0 else None
        if state is not None:
            # A client that joined later would begin at the clock that the others have reached.
            for client in range(self.workers):
                state = protocol.join(self.model, state, client).state
        self.seats[number] = Seat(number, shard, self.model, state, **given)
        for client in range(self.workers):
            self.seats[number].admit(client)

    def opened(self, number, service):
        self.services.append((number, service))
        return len(self.services) - 1

    def wire(self, port) -> Wire:
        number, service = self.services[port]
        spec = self.layout.spec
        return Mortal(self, number, LocalWire(service, partial(spec_for, push=spec, shard=spec)))

    def heard(self, number, what):
        # As a line in a pipe: the arbiter hears of it in another thread.
        threading.Thread(target=self.take, args=(number, what)).start()

    def take(self, number, what):
        with self.lock:
            if number in self.dead:
                return
            self.arbiter.hear(what)
            if what["event"] == "leads":
                for client in self.clients:
                    client.move(0, self.wire(what["port"]), what["epoch"])

    def tell(self, server, order):
        view, ports = RangeView(*order["view"]), dict(order["ports"])
        seat = self.seats[server]
        self.orders.submit(seat.view, view, ports)  # in order, as lines of a pipe

    def kill(self, number):
        with self.lock:
            self.dead.add(number)
            self.arbiter.failed(number)

    def client(self, number):
        until(lambda: self.arbiter.port is not None)
        client = Client(number, self.model, [self.layout], [self.wire(self.arbiter.port)],
                        patience=Timeouts(60.0, 0.2))  # fmt: skip
        self.clients.append(client)
        return client


class Mortal:
    """A wire to a server that may be killed: then it carries nothing either way."""

    def __init__(self, threads, number, inner):
        self.threads, self.number, self.inner = threads, number, inner

    def open(self, hear, ended):
        if self.number in self.threads.dead:
            raise WireError("dead")

        def heard(envelope):
            if self.number not in self.threads.dead:
                hear(envelope)

        session = self.inner.open(heard, ended)
        send = session.send

        def sent(envelope):
            if self.number not in self.threads.dead:
                send(envelope)

        session.send = sent
        return session


def work(client, clocks):
    client.read()
    while client.clock < clocks:
        client.push([delta(client.number, client.clock, LENGTH)])
        client.read()
    client.drain()


def test_rounds_go_on_when_a_leader_dies_with_a_round_open():
    """The change of the first worker waits for that of the second, and goes to the next leader."""
    threads = Threads(BSP(), 2)
    with threads.client(0) as one, threads.client(1) as other:
        both = one, other
        changes = [np.full(LENGTH, 1 + client.number, np.float32) for client in both]
        for client, change in zip(both, changes, strict=True):
            client.read()
            client.push([change])
        for client in both:
            client.drain()
            client.read()
        one.push([changes[0]])
        leader = threads.seats[0].server
        until(lambda: leader.state.clocks.held)
        threads.kill(0)
        until(lambda: threads.arbiter.port is not None)
        other.push([changes[1]])
        for client in both:
            client.drain()
    alone = optax.adam(0.1)
    params = np.zeros(LENGTH, np.float32)
    state = alone.init(params)
    for _ in range(2):
        updates, state = alone.update((changes[0] + changes[1]) / 2, state)
        params = optax.apply_updates(params, updates)
    shard = threads.seats[1].copies.shard
    np.testing.assert_allclose(shard.params, params, rtol=1e-6)
    assert threads.seats[1].server.state.clocks.version == 2


def test_a_server_that_joins_gets_the_optimizers_state():
    threads = Threads(BSP(), 1)
    with threads.client(0) as client:
        for _ in range(3):
            client.read()
            client.push([np.ones(LENGTH, np.float32)])
            client.drain()
        threads.kill(1)
        threads.start()
        until(lambda: threads.arbiter.safe)
        assert threads.arbiter.view.follower == 2
        client.read()
        client.push([np.ones(LENGTH, np.float32)])
        client.drain()
        leader, follower = (threads.seats[number].copies.shard for number in (0, 2))
        jax.tree.map(np.testing.assert_array_equal, leader.kept(), follower.kept())
        assert leader.params.tobytes() == follower.params.tobytes()


@pytest.mark.full
def test_a_follower_that_cannot_be_reached_is_named_and_nothing_is_lost():
    threads = Threads(WHOLE, 1)
    with threads.client(0) as client:
        client.patience = Timeouts(1.5, 0.2)
        client.read()
        threads.dead.add(1)  # the arbiter does not know
        client.push([np.ones(LENGTH, np.float32)])
        with pytest.raises(RunError, match="server 0 waits for server 1, which copies what it"):
            client.drain()
        threads.dead.clear()
        client.patience = Timeouts(60.0, 0.2)
        threads.seats[0].server._links[1]._lost.set()  # the session is opened again
        client.drain()
    for number in (0, 1):
        assert threads.seats[number].copies.shard.params.tolist() == [-1.0] * LENGTH


@pytest.mark.parametrize("seed", range(2))
def test_servers_die_and_every_acknowledged_push_is_applied_once(seed):
    rng, clocks = random.Random(seed), 60
    threads = Threads(WHOLE, 3)
    with ExitStack() as stack:
        clients = [stack.enter_context(threads.client(number)) for number in range(3)]
        workers = [threading.Thread(target=work, args=(one, clocks)) for one in clients]
        for one in workers:
            one.start()
        for kill in range(3):
            until(lambda: threads.arbiter.safe)
            reached = (kill + 1) * clocks // 5
            until(lambda reached=reached: max(one.clock for one in clients) >= reached)
            view = threads.arbiter.view
            threads.kill(view.leader if rng.random() < 0.7 else view.follower)
            threads.start()
        for one in workers:
            one.join(60)
            assert not one.is_alive()
        until(lambda: threads.arbiter.safe)
        view = threads.arbiter.view
        wanted = -sum(delta(n, clock, LENGTH) for n in range(3) for clock in range(clocks))
        found = [threads.seats[n].copies.shard.params for n in (view.leader, view.follower)]
        for params in found:
            assert params.tobytes() == (wanted + np.float32(0)).astype(np.float32).tobytes()
        assert view.epoch > 0


# In one process: above; processes that are killed: tests/param_server and tests/run/test_hybrid.py.
@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 50])
def test_server_processes_are_killed_and_nothing_acknowledged_is_lost(kills):
    sums, seconds = killed(kills, length=1000)
    assert len(seconds) == kills
    np.testing.assert_array_equal(*sums)
