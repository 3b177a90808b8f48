"""Servers and workers that run in this process: the protocol's promises over real wires."""

from __future__ import annotations

import random
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from live_servers import PARAMS, Faults, FaultyWire, Servers, at_once

from jaxdist.errors import ConfigError, RunError
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.order import read_order, step
from jaxdist.param_server.protocol.messages import Apply
from jaxdist.param_server.protocol.server import RangeState

MODELS = [
    BSP(),
    SSP(gradient_weight="whole"),
    SSP(gradient_weight="whole", reads="eager"),
    Asynchronous(gradient_weight="whole"),
    Asynchronous(gradient_weight="whole", reads="ahead"),
]
WHOLE = MODELS[3]


def delta(client: int, clock: int, length: int) -> np.ndarray:
    """Whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng([client, clock]).integers(-4, 5, length).astype(np.float32)


def flats(servers: Servers, client: int, clock: int) -> list[np.ndarray]:
    return [delta(client, clock, layout.length) for layout in servers.layouts]


def total(servers: Servers, done: dict[int, int]) -> list[np.ndarray]:
    """The sum of what clients sent that did so many clocks."""
    found = [np.zeros(layout.length, np.float32) for layout in servers.layouts]
    for client, clocks in done.items():
        for clock in range(clocks):
            for at, one in enumerate(flats(servers, client, clock)):
                found[at] += one
    return found


def train(servers: Servers, client: Client, clocks: int) -> None:
    while client.clock < clocks:
        client.read()
        client.push(flats(servers, client.number, client.clock))
    client.drain()


@pytest.mark.parametrize("rpc", [False, True], ids=["local", "rpc"])
@pytest.mark.parametrize("model", MODELS, ids=["bsp", "ssp", "essp", "async", "async, ahead"])
@pytest.mark.every(3)
def test_every_push_counts_once(model, rpc):
    with Servers(model, 3, rpc=rpc) as servers:

        def work(number: int) -> None:
            with servers.client(number) as client:
                train(servers, client, 8)

        at_once(work, 3)
        share = 3 if isinstance(model, BSP) else 1  # a round is the mean
        for found, wanted in zip(servers.servers, total(servers, {0: 8, 1: 8, 2: 8}), strict=True):
            np.testing.assert_allclose(found.shard.params, -wanted / share, rtol=0, atol=2e-5)
            assert found.counters.applied == 24
            assert found.state.clocks.version == (8 if share == 3 else 24)


@pytest.mark.parametrize("messages", [1_500, pytest.param(6_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("rpc", [False, True], ids=["local", "rpc"])
@pytest.mark.every(2)
def test_exactly_once_through_a_network_that_loses_doubles_and_reorders(messages, rpc):
    workers = 4
    with Servers(WHOLE, workers, rpc=rpc, count=1) as servers:
        faults = Faults(seed=messages)
        done: dict[int, int] = {}

        def work(number: int) -> None:
            wires = [FaultyWire(wire, faults) for wire in servers.wires]
            with servers.client(number, wires=wires, retry=0.02) as client:
                while faults.seen < messages:
                    train(servers, client, client.clock + 10)
                done[number] = client.clock

        at_once(work, workers)
        (server,) = servers.servers
        assert faults.seen >= messages
        assert min(faults.done.values()) > messages / 50
        assert server.counters.applied == sum(done.values())
        assert server.shard.params.tobytes() == (-total(servers, done)[0] + 0.0).tobytes()
        assert not server._payloads


def test_a_gradient_that_is_not_finite_is_refused_and_counted():
    with Servers(WHOLE, 1, count=1, rpc=True) as servers:
        (server,) = servers.servers
        with servers.client(0) as client:
            for bad in (np.nan, np.inf, -np.inf):
                (found,) = client.read()
                wrong = np.ones_like(found)
                wrong[5] = bad
                client.push([wrong])
                client.drain()
            client.read()
            client.push([np.ones_like(found)])
            client.drain()
        assert server.counters.dropped == Counter({"the push contains a NaN or an infinity": 3})
        assert server.counters.applied == 1
        assert server.shard.params.tolist() == [-1.0] * server.shard.layout.length


def test_who_is_late_is_named():
    with Servers(BSP(), 2, count=1, rpc=True) as servers:
        patience = Timeouts(deadline_seconds=1.0, retry_seconds=9.0)
        wires, layouts = servers.wires, servers.layouts
        with Client(0, servers.model, layouts, wires, patience=patience) as client:
            client.push([one * 0 for one in client.read()])
            with pytest.raises(
                RunError,
                match=r"client 0 at clock 1 waited 1 s for parameters to compute from: "
                "server 0 waits for clients 1 ",
            ):
                client.read()


@pytest.mark.full
def test_a_server_that_is_not_there_is_named():
    with Servers(BSP(), 1, count=1, rpc=True) as servers:
        servers.rpcs[0].close()
        patience = Timeouts(deadline_seconds=0.3)
        with (
            Client(0, servers.model, servers.layouts, servers.wires, patience=patience) as client,
            pytest.raises(RunError, match="server 0 cannot be reached"),
        ):
            client.read()


@pytest.mark.full
def test_a_session_that_breaks_is_opened_again_and_nothing_is_lost():
    with Servers(WHOLE, 2, rpc=True) as servers:
        stop = threading.Event()

        def breaks() -> None:
            rng = random.Random(3)
            while not stop.wait(0.02):
                one = rng.choice(servers.servers)
                with one._changed:
                    peers = list(one._peers.values())
                for peer in peers:
                    peer.close()

        breaker = threading.Thread(target=breaks)
        breaker.start()

        def work(number: int) -> None:
            with servers.client(number, retry=0.5) as client:
                train(servers, client, 25)

        at_once(work, 2)
        stop.set()
        breaker.join()
        for found, wanted in zip(servers.servers, total(servers, {0: 25, 1: 25}), strict=True):
            assert found.shard.params.tobytes() == (-wanted + 0.0).tobytes()
            assert found.counters.applied == 50


def test_a_late_worker_pushes_for_the_same_round_at_all_servers():
    """Server 1 has ended the round without the late worker, and server 0 has not."""
    with Servers(BSP(backups=1), 3) as servers:
        first, second = servers.servers
        with servers.client(0) as one, servers.client(1) as other, servers.client(2) as late:
            for client in one, other, late:
                client.read()
            for client in one, other, late:
                client.push(flats(servers, client.number, 0))
            for client in one, other:
                client.read()
                client._push_to(1, flats(servers, client.number, 1)[1], 1, 1.0)
            other.wait_until(lambda: not other._links[1].payloads, "server 1")
            late.read()
            assert [link.state.clock for link in late._links] == [1, 2]
            late.push(flats(servers, 2, 1))
            for client in one, other:
                client._push_to(0, flats(servers, client.number, 1)[0], 1, 1.0)
            for client in one, other, late:
                client.drain()
        for server in first, second:
            assert (server.state.clocks.version, server.state.clocks.held) == (2, ())
            assert dict(server.counters.dropped) == {"round n is over": 2}


def test_who_leaves_is_not_waited_for_and_who_joins_pulls():
    with Servers(BSP(), 2) as servers:
        with servers.client(0) as first:
            first.push([one * 0 for one in first.read()])
            for server in servers.servers:
                server.leave(1)
                server.admit(2)
            first.read()  # the round is over without client 1
        with servers.client(2) as new:
            for server in servers.servers:
                server.leave(0)
            assert [one.tolist() for one in new.read()] == [
                server.shard.params.tolist() for server in servers.servers
            ]
            assert new.clock == 1


@pytest.mark.parametrize(
    ("number", "reason"),
    [(1, "client 1 has left: use a number that was never used"), (7, "client 7 is not expected")],
)
def test_numbers_that_are_no_member_s_are_refused(number, reason):
    with Servers(BSP(), 2, count=1, rpc=True) as servers:
        servers.servers[0].leave(1)
        with (
            servers.client(number) as client,
            pytest.raises(RunError, match=f"server 0 refused.*{reason}"),
        ):
            client.read()
        assert servers.servers[0].state.members == (0,)


def test_another_epoch_is_refused():
    with Servers(BSP(), 1, count=1, rpc=True) as servers:
        layouts, wires = servers.layouts, servers.wires
        with (
            Client(0, servers.model, layouts, wires, epoch=1) as client,
            pytest.raises(RunError, match="epoch 1 differs from the epoch 0"),
        ):
            client.read()


@pytest.mark.parametrize("model", [*MODELS, Decoupled(local_steps=1, grace_seconds=0.01)])
@pytest.mark.every(3)
def test_a_log_replays_to_the_same_bits(model, tmp_path):
    """Live, nobody knows in which order pushes meet; the log does."""
    noise = np.random.default_rng(5)
    sent: dict[tuple[int, int, int], np.ndarray] = {}
    with Servers(model, 3, log=tmp_path) as servers:

        def work(number: int) -> None:
            with servers.client(number) as client:
                for _ in range(10):
                    read = client.read()
                    changes = [
                        one * 0.1 + noise.standard_normal(one.size).astype("f4") for one in read
                    ]
                    sequences = [link.state.sequence for link in client._links]
                    client.push(changes)
                    for at, change in enumerate(changes):
                        sent[at, number, sequences[at]] = change
                client.drain()

        at_once(work, 3)
        live = [server.shard.params.tobytes() for server in servers.servers]
        versions = [server.state.clocks.version for server in servers.servers]
    with Servers(model, 3) as again:
        for at, server in enumerate(again.servers):
            state = RangeState(Clocks(3))
            for taken in read_order(tmp_path / f"server_{at}.jsonl"):
                found = step(model, state, taken)
                state = found.state
                for effect in found.effects:
                    if isinstance(effect, Apply):
                        server.shard.apply(
                            effect.merge, lambda one, at=at: sent[at, one.client, one.sequence]
                        )
            assert state.clocks.version == versions[at]
            assert server.shard.params.tobytes() == live[at]


def test_an_order_log_that_is_none(tmp_path):
    path = tmp_path / "log.jsonl"
    with pytest.raises(RunError, match="cannot be read: No such file"):
        list(read_order(path))
    path.write_text('["join", 0.5, 1]\n["join", "now", 1]\n')
    with pytest.raises(RunError, match=r"line 2: '\[\"join\", \"now\", 1\]' is not an entry"):
        list(read_order(path))
    path.write_text('["join", 0.5, 1]\n["join", 0.')  # torn by a kill
    assert len(list(read_order(path))) == 1


def test_params_are_laid_out_and_put_together_again():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((10, 4)), "s": rng.standard_normal(()), "b": PARAMS["b"]}
    params = {name: array.astype(np.float32) for name, array in params.items()}
    with Servers(BSP(), 1, params=params, count=3) as servers:
        found = servers.params_now()
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in params.items()}


def test_parameters_of_several_dtypes_are_updated_as_on_one_device():
    """Servers round each parameter to its own dtype, so that the bits equal those of optax."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((10, 4)).astype(np.float32)}
    params["b"] = rng.standard_normal(7).astype(jnp.bfloat16)
    transform = optax.with_extra_args_support(optax.adam(0.1))
    wanted, state = params, transform.init(params)
    with (
        Servers(BSP(), 1, params=params, transform=transform) as servers,
        servers.client(0) as client,
    ):
        for _ in range(3):
            grads = {
                name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in params.items()
            }
            client.read()
            client.push([layout.flatten(grads) for layout in servers.layouts])
            updates, state = jax.jit(transform.update)(grads, state, wanted)
            wanted = optax.apply_updates(wanted, updates)
        client.drain()
        found = servers.params_now()
    assert found["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["b"], wanted["b"])
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-6)
    with pytest.raises(ConfigError, match="some parameters are int32 and others are not"):
        Servers(BSP(), 1, params={"w": params["w"], "n": np.zeros(3, np.int32)})
