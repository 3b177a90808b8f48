"""The entry point of a run's processes: servers, aggregators and workers.

The supervisor starts this module with `python -m`. The process of this module imports everything
and forks the other processes. The first line of a forked process's input contains its role and its
setup, and each later line contains an order. The process ends when its input ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxdist.data.cache import cache_directory
from jaxdist.errors import JaxdistError
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.order import OrderLog, server_log
from jaxdist.param_server.live.secure import MaskingClient, SecureServer
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.live.shard import ServerShard, ShardState
from jaxdist.param_server.processes.aggregator import AggregatorProcess
from jaxdist.param_server.processes.parts import part_of
from jaxdist.param_server.processes.setup import (
    listening,
    run_experiment,
    run_of,
    server_place,
    wires_to,
)
from jaxdist.param_server.processes.tables import TableProcess
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.files import read_shard, write_shard
from jaxdist.param_server.training.worker import Measured, Worker
from jaxdist.runtime import compilation_cache
from jaxdist.runtime.children import Parent
from jaxdist.runtime.forks import await_fork, hold_signals
from jaxdist.types import JsonObject

STATS_SECONDS = 1.0
BETWEEN_SECONDS = 0.02
"""The shortest time between two reports, in seconds, for any number of updates."""


class ServerProcess:
    """A server, with its shard, its port, and a thread that writes checkpoints."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.run, self.number, self.parent = run_of(setup), setup["number"], parent
        _, sharded = run_experiment(setup)
        cluster = sharded.cluster
        self.layout = next(one for one in sharded.layouts if one.server == self.number)
        start = read_shard(self.run, sharded, self.layout, setup["clock"])
        self._squares: deque[tuple[int, float]] = deque()
        self._news = threading.Event()
        self._reached: queue.SimpleQueue[ShardState | None] = queue.SimpleQueue()
        model, transform = cluster.consistency, sharded.transform(self.layout)
        shard = ServerShard(self.layout, model, transform, start.params, start.optimizer)
        clocks = Clocks(cluster.clients, version=start.version, floor=start.floor)
        begin: Callable[..., Server] = Server
        if cluster.secure:
            begin = partial(SecureServer, **cluster.secure, failed=self._fail)
        self.server = begin(
            shard,
            model,
            RangeState(clocks),
            codes=next((one for one in sharded.codes if one.layout is self.layout), None),
            due=setup["due"],
            reached=self._reached.put,
            applied=self._applied,
            log=OrderLog(self.run / "order" / server_log(self.number, start.floor)),
        )
        for client in setup["clients"]:
            self.server.join(client)
        for client in setup["admitted"]:
            self.server.admit(client)
        given = (cluster.processes, setup, self.number, cluster.workers)
        self.rpc = listening(self.server, *given)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._write, self._tell)]
        for thread in self._threads:
            thread.start()
        parent.say("listening", ports=[server_place(setup, self.rpc)])

    def order(self, what: JsonObject) -> None:
        """Carry out an order: a worker leaves or may join, or a clock at which to save is added."""
        match what:
            case {"leave": int(client)}:
                self.server.leave(client)
            case {"admit": int(client)}:
                self.server.admit(client)
            case {"stop": int(clock)}:
                self.server.add_due(clock)
            case _:
                raise AssertionError(what)

    def _fail(self, reason: str) -> None:
        self.parent.say("failed", error=reason)

    def close(self) -> None:
        """Close the port, stop the threads, and close the log."""
        self.rpc.close()
        self._over.set()
        self._news.set()
        self._reached.put(None)
        for thread in self._threads:
            thread.join()
        self.server.close()

    def _write(self) -> None:
        while (reached := self._reached.get()) is not None:
            try:
                write_shard(self.run, self.number, reached)
            except JaxdistError as error:
                self.parent.say("failed", error=str(error))
                return
            self.parent.say("saved", clock=reached.floor)

    def _applied(self, version: int, square: float) -> None:
        self._squares.append((version, square))
        self._news.set()

    def _tell(self) -> None:
        while not self._over.is_set():
            self._news.wait(STATS_SECONDS)
            self._news.clear()
            self._flush()
            self._over.wait(BETWEEN_SECONDS)

    def _flush(self) -> None:
        # The floor is read before the norms, so that a reported floor comes with the norms of all
        # earlier clocks.
        stats = self.server.stats()
        squares = [self._squares.popleft() for _ in range(len(self._squares))]
        self.parent.say("applied", squares=squares, stats=stats)


class WorkerProcess:
    """A worker, with its part of each batch and its sessions with all servers."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.setup, self.parent = setup, parent
        experiment, sharded = run_experiment(setup)
        cluster, slot = sharded.cluster, setup["slot"]
        rack = cluster.rack_of(slot)
        loader, program = part_of(experiment, sharded, slot)
        processes = cluster.processes
        # The deadline is twice the supervisor's deadline, so that the supervisor replaces a late
        # worker before the workers that wait for it fail.
        patience = Timeouts(2 * processes.deadline_seconds, processes.retry_seconds)
        begin = partial(MaskingClient, **cluster.secure) if cluster.secure else Client
        self.client = begin(
            setup["number"],
            cluster.of_workers,
            sharded.layouts,
            wires_to(sharded, setup),
            codes=sharded.codes,
            patience=patience,
            through="" if rack is None else f"aggregator {rack} of ",
        )
        given = (self.client, sharded, program, loader, slot, setup["stop"])
        self.worker = Worker(*given, self._measure, self._tell)

    def order(self, what: JsonObject) -> None:
        """Carry out the supervisor's order to stop at a clock."""
        self.worker.stop = what["stop"]

    def _measure(self, clock: int, sums: Measured) -> None:
        self.parent.say("measured", clock=clock, sums=sums)

    def _tell(self, report: JsonObject) -> None:
        self.parent.say("clock", **report)


def serve(
    role: type[ServerProcess | AggregatorProcess | TableProcess], setup: JsonObject, parent: Parent
) -> None:
    """Run a server or an aggregator until its input ends.

    Args:
      role: the class of the process.
      setup: the setup of the process, from the supervisor.
      parent: the connection to the supervisor, which sends orders.
    """
    process = role(setup, parent)
    for what in parent.hear():
        process.order(what)
    process.close()


def work(setup: JsonObject, parent: Parent) -> None:
    """Run a worker until it has finished its clocks, or until its input ends."""
    process = WorkerProcess(setup, parent)

    def listen() -> None:
        for what in parent.hear():
            process.order(what)
        os._exit(1)  # The supervisor is gone or ends the run.

    threading.Thread(target=listen, daemon=True).start()
    with process.client:
        process.worker.run()


ROLES: dict[str, Callable[[JsonObject, Parent], None]] = {
    "server": partial(serve, ServerProcess),
    "aggregator": partial(serve, AggregatorProcess),
    "table": partial(serve, TableProcess),
    "worker": work,
}


def main() -> None:
    """Fork processes; a forked process runs the role in the first line of its input."""
    hold_signals()
    if not await_fork():
        return
    parent = Parent()
    setup = next(parent.hear(), None)
    if setup is None:
        return
    role = setup["role"]
    with suppress(OSError):  # This sets the name that `ps` and `top` show on Linux.
        Path("/proc/self/comm").write_text(f"{role} {setup['number']}")
    if setup.get("stays"):
        # A scheduler signals all processes of a job, and the run ends this process itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    compilation_cache.enable(cache_directory() / "compiled")
    try:
        ROLES[role](setup, parent)
    except JaxdistError as error:
        parent.say("failed", error=str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
