"""The longest wait of a push while workers are killed at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import optax

from benchmarks.core.report import Figure
from benchmarks.param_server.pusher import WHOLE, layout_of, started
from benchmarks.param_server.serving import listening, served
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Arrival, Merge
from jaxdist.param_server.live.shard import ServerShard

LENGTH = 10_000
WORKERS, KILLS = 3, 10
GOAL_SECONDS = 1.0
START_SECONDS = 60.0


@dataclass
class Gaps:
    """The times at which changes of each client were applied.

    Attributes:
      last: for each client, the time of its last applied change.
      longest: the most seconds between two successive changes of a client.
    """

    last: dict[int, float] = field(default_factory=dict)
    longest: float = 0.0

    def applied(self, client: int) -> None:
        """Record that a change of `client` was applied now."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self.last.get(client, now))
        self.last[client] = now


class Counted(ServerShard):
    """A shard that records the clients whose changes it applies."""

    def __init__(self, gaps: Gaps) -> None:
        layout = layout_of(LENGTH)
        sgd = optax.with_extra_args_support(optax.sgd(1.0))
        super().__init__(layout, WHOLE, sgd, np.zeros(LENGTH, np.float32))
        self._gaps = gaps

    def apply(self, merge: Merge, change_of: Callable[[Arrival], np.ndarray]) -> None:
        super().apply(merge, change_of)
        for one in merge.arrivals:
            self._gaps.applied(one.client)


def longest_stall(kills: int = KILLS, seed: int = 0) -> Figure:
    """Kill asynchronous workers one at a time, and start a new worker in place of each.

    Raises:
      RunError: a worker does not start.
    """
    rng, gaps = random.Random(seed), Gaps()
    with ExitStack() as stack:
        server = served(Counted(gaps), WHOLE, WORKERS)
        port = stack.enter_context(listening(server))
        team = {}

        def start(client: int) -> None:
            team[client] = started(client, port, LENGTH)

        def end(client: int) -> None:
            team[client].kill()
            team.pop(client).communicate()
            server.leave(client)

        for client in range(WORKERS):
            start(client)
        for new in range(WORKERS, WORKERS + kills):
            _until(lambda: gaps.last.keys() >= team.keys())
            time.sleep(rng.random() / 5)
            end(rng.choice(sorted(team)))
            server.admit(new)
            start(new)
        _until(lambda: gaps.last.keys() >= team.keys())
        for client in sorted(team):
            end(client)
    return Figure(
        f"longest wait of a push while {kills} workers are killed",
        gaps.longest,
        GOAL_SECONDS,
        "<= 1",
        "s",
        f"{WORKERS} processes that push all the time, async; from one change of a worker to its "
        "next, new processes starting beside them; the reference is the goal",
    )


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"a worker has not started in {START_SECONDS:g} s")
        time.sleep(0.005)
