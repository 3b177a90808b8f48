"""Workers are killed at any moment: what was acknowledged is applied, and everything once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from live_servers import WHOLE_STEPS, Servers

from benchmarks.param_server.pusher import WHOLE, delta, started
from jaxdist.param_server.consistency.rounds import BSP

LENGTH = 10_000


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_workers_are_killed_under_load(kills: int):
    rng, applied, acknowledged = random.Random(kills), Counter[tuple[int, int]](), {}
    by_client = Counter[int]()
    params = {"w": np.zeros(LENGTH, np.float32)}
    given: dict[str, Any] = {"params": params, "count": 1, "transform": WHOLE_STEPS, "rpc": True}
    with Servers(WHOLE, 2, **given) as servers:
        (server,), (rpc,) = servers.servers, servers.rpcs
        apply = server.shard.apply

        def counted(merge, change_of):
            applied.update((one.client, one.clock) for one in merge.arrivals)
            by_client.update(one.client for one in merge.arrivals)
            apply(merge, change_of)

        server.shard.apply = counted
        team = {client: started(client, rpc.port, LENGTH) for client in range(2)}

        def end(client: int) -> None:
            team[client].kill()
            out, _ = team.pop(client).communicate()
            clocks = [int(line) for line in out.split()] or [0]
            acknowledged[client] = range(clocks[0], clocks[-1])
            server.leave(client)

        for new in range(2, 2 + kills):
            victim = rng.choice(sorted(team))
            until(lambda: by_client.keys() >= team.keys())
            time.sleep(rng.random() / 20)
            others = sum(by_client.values())
            end(victim)
            server.admit(new)
            team[new] = started(new, rpc.port, LENGTH)
            until(lambda: sum(by_client.values()) > others + 5)  # noqa: B023 (the others go on)
        for client in sorted(team):
            end(client)
        assert set(applied.values()) == {1}
        for client, clocks in acknowledged.items():
            assert all((client, at) in applied for at in clocks)
        assert sum(map(len, acknowledged.values())) > 5 * kills
        total = np.zeros(LENGTH, np.float32)
        for client, clock in applied:
            total -= delta(client, clock, LENGTH)
        assert server.shard.params.tobytes() == (total + 0.0).tobytes()


def test_a_worker_that_joins_is_in_the_same_round_at_all_servers():
    """One server was still in the round before; its push there adds nothing."""
    with Servers(BSP(), 2) as servers:
        first, second = servers.servers
        for server in servers.servers:
            server.leave(1)
            server.admit(2)
        first.join(2)
        with servers.client(0) as other:
            other.push([one * 0 + 1 for one in other.read()])
            until(lambda: second.state.clocks.version == 1)
            with servers.client(2) as joined:
                joined.read()
                assert [link.state.clock for link in joined._links] == [1, 1]
                assert joined.clock == 1
                assert other.read()[0][0] == -1  # Not the mean with a push of zeros.
                assert dict(first.counters.dropped) == {"the push has no tokens": 1}
