"""A program that runs one server of a replicated range, and a bench that kills such servers.

`python -m benchmarks.param_server.replicated NUMBER LEADS LENGTH` writes reports to its standard
output and reads the arbiter's orders from its standard input, a line of JSON each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import optax

from benchmarks.core.report import Figure
from benchmarks.param_server.pusher import PAUSE_SECONDS, WHOLE, delta, layout_of
from benchmarks.param_server.receivers import TOKEN
from benchmarks.param_server.serving import wire_to
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import RangeView
from jaxdist.replication.seat import Arbiter, Seat
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject
from jaxdist.wire.contract import Service
from jaxdist.wire.ports import Place
from jaxdist.wire.rpc import RpcServer

WAIT_SECONDS = 120.0
GOAL_SECONDS = 3.0
LENGTH = 10_000


class Range:
    """A range on two server processes. A new process replaces a process that is killed.

    Args:
      length: number of parameters.
      moved: called with the epoch and the port whenever a server begins to lead.
    """

    def __init__(self, length: int, moved: Callable[[int, int], None]) -> None:
        self.length, self._moved = length, moved
        self.servers: dict[int, subprocess.Popen[str]] = {}
        self._lock = threading.Condition()
        self.arbiter = Arbiter(0, 0, self._tell)
        self._next, self._ended = 0, set[int]()
        self._hearings: list[threading.Thread] = []
        for _ in range(2):
            self.start()

    def start(self) -> None:
        """Start a server with a number that no server had; the first leads."""
        number, self._next = self._next, self._next + 1
        given = map(str, (number, int(number == 0), self.length))
        command = python_module(__spec__.name, *given)
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.servers[number] = child
        hearing = threading.Thread(target=self._hear, args=(number, child), daemon=True)
        self._hearings.append(hearing)
        hearing.start()

    def kill(self, number: int) -> None:
        """Kill a server with SIGKILL, and wait until the arbiter knows.

        If the other server were killed before the arbiter knows, the range would be lost.
        """
        self.servers[number].kill()
        with self._lock:
            self._lock.wait_for(lambda: number in self._ended, WAIT_SECONDS)

    def await_safe(self) -> None:
        """Wait until the range has a leader and a follower."""
        with self._lock:
            if not self._lock.wait_for(lambda: self.arbiter.safe, WAIT_SECONDS):
                raise RunError(
                    f"after {WAIT_SECONDS:g} s the range has no leader with a follower "
                    f"({self.arbiter.view}): see whether its servers could start"
                )

    def close(self) -> None:
        """End all servers."""
        for child in [*self.servers.values()]:
            child.kill()
            child.wait()
        for hearing in self._hearings:
            hearing.join()
        for child in self.servers.values():
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with suppress(OSError):  # an unwritten message is lost with the server
                    pipe.close()

    def _tell(self, server: int, order: JsonObject) -> None:
        stdin = self.servers[server].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()

    def _hear(self, number: int, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            what = json.loads(line)
            with self._lock:
                self.arbiter.hear(what)
                self._lock.notify_all()
            if what["event"] == "leads":
                self._moved(what["epoch"], what["port"])
        with self._lock:
            self.arbiter.failed(number)
            self._ended.add(number)
            self._lock.notify_all()


def seat(number: int, leads: bool, length: int, say: Callable[[JsonObject], None]) -> Seat:
    """Return a server's part in a range of plain SGD at rate 1."""
    layout = layout_of(length)
    sgd = optax.with_extra_args_support(optax.sgd(1.0, momentum=0.0))
    shard = ServerShard(layout, WHOLE, sgd, np.zeros(length, np.float32))
    state = RangeState(Clocks(1)) if leads else None
    kept: list[RpcServer] = []  # a collected server would close its port

    def opens(service: Service) -> int:
        kept.append(RpcServer(service, TOKEN))
        return kept[-1].port

    return Seat(
        number,
        shard,
        WHOLE,
        state,
        opens=opens,
        wire_to=partial(wire_to, spec=layout.spec),
        say=say,
    )


class Pusher:
    """A worker in a thread of this process; it keeps the time of its last acknowledged push."""

    def __init__(self, number: int, port: Place, length: int) -> None:
        self.layout = layout_of(length)
        self.client = Client(number, WHOLE, [self.layout], [wire_to(port, self.layout.spec)])
        self._first = self.acknowledged = 0
        self.last, self._over = 0.0, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def move(self, epoch: int, port: Place) -> None:
        """Continue with the server that leads in an epoch."""
        self.client.move(0, wire_to(port, self.layout.spec), epoch)

    def close(self) -> np.ndarray:
        """End the worker, and return the sum of what it pushed."""
        self._over = True
        self._thread.join()
        self.client.close()
        zero = np.zeros(self.layout.length, np.float32)
        number, length = self.client.number, self.layout.length
        clocks = range(self._first, self.acknowledged)
        return sum((delta(number, at, length) for at in clocks), start=zero)

    def _run(self) -> None:
        self.client.read()
        # A worker that joins after another begins at its clock.
        self._first = self.acknowledged = self.client.clock
        while not self._over:
            self.client.push([delta(self.client.number, self.client.clock, self.layout.length)])
            self.client.drain()
            self.acknowledged, self.last = self.client.clock, time.monotonic()
            self.client.read()
            time.sleep(PAUSE_SECONDS)


def killed(kills: int, length: int, workers: int = 2) -> tuple[list[np.ndarray], list[float]]:
    """Kill servers at random moments, and return the sums applied and acknowledged, and times.

    Returns:
      The sum that the last leader has applied; the sum that was pushed and acknowledged; and for
      each kill, the seconds until each worker had an acknowledgement for a push that it sent
      afterwards.
    """
    rng, seconds, team = random.Random(kills), list[float](), list[Pusher]()

    def moved(epoch: int, port: int) -> None:
        for one in team:
            one.move(epoch, port)

    servers = Range(length, moved)
    try:
        servers.await_safe()
        assert servers.arbiter.port is not None
        team += [Pusher(number, servers.arbiter.port, length) for number in range(workers)]
        for _ in range(kills):
            servers.await_safe()
            time.sleep(rng.random() / 2)
            view = servers.arbiter.view
            assert view is not None
            assert view.follower is not None
            begun = time.monotonic()
            servers.kill(view.leader if rng.random() < 0.7 else view.follower)
            while not all(one.last > begun for one in team):
                if time.monotonic() > begun + WAIT_SECONDS:
                    raise RunError(f"no push is acknowledged {WAIT_SECONDS:g} s after a kill")
                time.sleep(0.001)
            seconds.append(time.monotonic() - begun)
            servers.start()
        sums = [one.close() for one in team]
        servers.await_safe()
        port, view = servers.arbiter.port, servers.arbiter.view
        assert port is not None
        assert view is not None
        last = Client(workers, WHOLE, [layout_of(length)], [wire_to(port, layout_of(length).spec)],
                      epoch=view.epoch)  # fmt: skip
        with last:
            (params,) = last.read()
    finally:
        servers.close()
    return [0 - params, sum(sums[1:], start=sums[0])], seconds


def figures(kills: int = 10) -> list[Figure]:
    """Measure how long pushes stall when a server is killed."""
    sums, seconds = killed(kills, LENGTH)
    lost = float(np.abs(sums[0] - sums[1]).max())
    note = f"{kills} SIGKILLs of leaders and followers; {lost:g} is the largest difference between "
    note += "what was acknowledged and what is applied"
    worst = sorted(seconds)[-max(1, len(seconds) // 20)]
    return [Figure("longest stall after a kill (p95)", worst, GOAL_SECONDS, "<= 1", note=note)]


def main(number: int, leads: int, length: int) -> None:
    own = seat(number, bool(leads), length, lambda what: print(json.dumps(what), flush=True))
    for client in range(64):
        own.admit(client)
    for line in sys.stdin:
        order = json.loads(line)
        own.view(RangeView(*order["view"]), dict(map(tuple, order["ports"])))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
