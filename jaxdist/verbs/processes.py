"""A server or a worker of a run, started by its supervisor as `python -m` this module, its role.

The first line of its input is the setup, later ones are orders; the end of its input ends it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxdist.data.cache import cache_directory
from jaxdist.errors import JaxdistError, RunError
from jaxdist.experiment import Experiment, build, load
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.client import Client, Patience
from jaxdist.param_server.live.order import OrderLog
from jaxdist.param_server.live.server import Reached, Server
from jaxdist.param_server.live.shard import Shard
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.wire.config import is_loopback
from jaxdist.param_server.wire.frames import spec_for
from jaxdist.param_server.wire.rpc import RpcServer, RpcWire
from jaxdist.param_server.wire.security import read_tls, read_token
from jaxdist.runtime import compilation_cache
from jaxdist.train.directory import RunDirectory
from jaxdist.train.servers.children import Parent
from jaxdist.train.servers.files import read_shard, write_shard
from jaxdist.train.servers.state import Sharded, ShardState
from jaxdist.train.servers.worker import Clocked, Worker, share_of
from jaxdist.train.strategy.parameter_server import ParameterServer
from jaxdist.types import JsonObject

STATS_SECONDS = 1.0
BETWEEN_SECONDS = 0.02
"""Between two reports, of however many updates."""


def sharded_run(run: Path) -> tuple[Experiment, ParameterServer, Sharded]:
    """The experiment of a run directory, and how it lies on servers."""
    document, config = load(RunDirectory(run).config)
    experiment = build(config, document)
    strategy = config.strategy
    assert isinstance(strategy, ParameterServer), strategy.type
    placement = strategy.placed(experiment.program.model.params, config.optim)
    given = (strategy, experiment.program, config.optim, placement, config.seed)
    return experiment, strategy, Sharded(*given)


class ServerProcess:
    """One server: its shard, its port, and a thread that writes checkpoints."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.run, self.number, self.parent = Path(setup["run"]), setup["number"], parent
        _, cluster, sharded = sharded_run(self.run)
        self.layout = next(one for one in sharded.layouts if one.server == self.number)
        start = read_shard(self.run, sharded, self.layout, setup["clock"])
        self._squares: deque[tuple[int, float]] = deque()
        self._news = threading.Event()
        self._reached: queue.SimpleQueue[Reached | None] = queue.SimpleQueue()
        model, transform = cluster.consistency, sharded.transform(self.layout)
        shard = Shard(self.layout, model, transform, start.params, start.optimizer)
        clocks = Clocks(cluster.workers, version=start.version, floor=start.floor)
        name = f"server_{self.number}.from_{start.floor}.jsonl"
        self.server = Server(
            shard,
            model,
            RangeState(clocks),
            codes=next((one for one in sharded.codes if one.layout is self.layout), None),
            due=setup["due"],
            reached=self._reached.put,
            applied=self._applied,
            log=OrderLog(self.run / "order" / name),
        )
        for client in setup["clients"]:
            self.server.join(client)
        processes = cluster.processes
        self.rpc = RpcServer(
            self.server,
            read_token(Path(setup["token"])),
            host=processes.host,
            port=processes.port and processes.port + self.number,
            tls=processes.tls and read_tls(processes.tls),
            sessions=4 * cluster.workers + 8,
        )
        self._over = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._write, self._tell)]
        for thread in self._threads:
            thread.start()
        parent.say("listening", port=self.rpc.port)

    def order(self, what: JsonObject) -> None:
        """What the supervisor says."""
        match what:
            case {"leave": int(client)}:
                self.server.leave(client)
            case {"admit": int(client)}:
                self.server.admit(client)
            case {"stop": int(clock)}:
                self.server.add_due(clock)
            case _:
                raise AssertionError(what)

    def close(self) -> None:
        """End the port, the threads and the log."""
        self.rpc.close()
        self._over.set()
        self._news.set()
        self._reached.put(None)
        for thread in self._threads:
            thread.join()
        self.server.close()

    def _write(self) -> None:
        while (reached := self._reached.get()) is not None:
            shard = ShardState(reached.floor, reached.version, reached.params, reached.optimizer)
            try:
                write_shard(self.run, self.number, shard)
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
        # The floor before the norms: who hears of a floor has those of all clocks before it.
        stats = self.server.stats()
        squares = [self._squares.popleft() for _ in range(len(self._squares))]
        self.parent.say("applied", squares=squares, stats=stats)


class WorkerProcess:
    """One worker: its part of each batch, and its sessions with all servers."""

    def __init__(self, setup: JsonObject, parent: Parent) -> None:
        self.setup, self.parent = setup, parent
        experiment, cluster, sharded = sharded_run(Path(setup["run"]))
        config, slot = experiment.config, setup["slot"]
        shares = cluster.shares(config.train.batch_size)
        loader = experiment.loader.part(sum(shares[:slot]), shares[slot])
        microbatches = config.train.microbatches_of(shares[slot])
        program = share_of(sharded, loader, microbatches)
        processes = cluster.processes
        token = read_token(Path(setup["token"]))
        tls = processes.tls and read_tls(processes.tls)
        shares_memory = processes.shared_memory and is_loopback(processes.host)
        wires = [
            RpcWire(
                f"{processes.host}:{port}",
                token,
                partial(spec_for, push=push, shard=layout.spec),
                tls,
                max(push.size_bytes, layout.spec.size_bytes) if shares_memory else 0,
            )
            for layout, push, port in zip(
                sharded.layouts, sharded.pushes, setup["ports"], strict=True
            )
        ]
        # Longer than the supervisor's: it ends those who are late, and spares those who wait.
        patience = Patience(2 * processes.deadline_seconds, processes.retry_seconds)
        self.client = Client(
            setup["number"],
            cluster.consistency,
            sharded.layouts,
            wires,
            codes=sharded.codes,
            patience=patience,
        )
        self.worker = Worker(self.client, sharded, program, loader, slot, setup["stop"], self._tell)

    def order(self, what: JsonObject) -> None:
        """What the supervisor says."""
        match what:
            case {"stop": int(clock)}:
                self.worker.stop = clock
            case _:
                raise AssertionError(what)

    def _tell(self, one: Clocked) -> None:
        self.parent.say("clock", **vars(one))


def serve(setup: JsonObject, parent: Parent) -> None:
    """A server, until its input ends."""
    process = ServerProcess(setup, parent)
    for what in parent.hear():
        process.order(what)
    process.close()


def work(setup: JsonObject, parent: Parent) -> None:
    """A worker, until its clocks or its input end."""
    process = WorkerProcess(setup, parent)

    def listen() -> None:
        for what in parent.hear():
            process.order(what)
        os._exit(1)  # the supervisor is gone, or wants no more

    threading.Thread(target=listen, daemon=True).start()
    with process.client:
        process.worker.run()


ROLES: dict[str, Callable[[JsonObject, Parent], None]] = {"server": serve, "worker": work}


def main() -> None:
    """The role that is named, with the setup that comes first."""
    parent = Parent()
    compilation_cache.enable(cache_directory() / "compiled")
    try:
        ROLES[sys.argv[1]](next(parent.hear()), parent)
    except RunError as error:
        parent.say("failed", error=str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
