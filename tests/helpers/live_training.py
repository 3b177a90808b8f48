"""Training of a config by servers and workers in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from live_servers import at_once

from benchmarks.param_server.local_wire import LocalWire
from jaxdist.config.document import Document
from jaxdist.config.schema import validate
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.aggregator import Aggregator
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.order import OrderLog, read_order
from jaxdist.param_server.live.reception import Reception
from jaxdist.param_server.live.secure import MaskingClient, SecureServer
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.live.shard import ServerShard, ShardState
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.replay import Replay
from jaxdist.param_server.training.state import Sharded
from jaxdist.param_server.training.worker import Measured, Worker, computation
from jaxdist.train.strategy.config import ParameterServer
from jaxdist.train.strategy.statistics import with_statistics
from jaxdist.wire.frames import spec_for

DIGITS = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {"type": "images", "source": "digits"},
    "optim": {"type": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1},
    "train": {"steps": 6, "batch_size": 32},
}


class Training:
    """A run whose servers and workers are threads; the method `run` runs all clocks."""

    def __init__(self, log: Path | None = None, sections: Any = None, **strategy: Any) -> None:
        given = {"type": "parameter_server", "workers": 2, **strategy}
        document = Document({**DIGITS, **(sections or {}), "strategy": given})
        config = validate(document, ExperimentConfig)
        self.experiment: Experiment = build(config, document, devices=jax.devices()[:1])
        assert isinstance(config.strategy, ParameterServer)
        self.cluster = config.strategy
        program = self.experiment.program
        whole = with_statistics(program.model.params, program.model.buffers)
        placement = self.cluster.placed(whole, config.optim)
        self.sharded = Sharded(self.cluster, program, config.optim, placement, config.seed)
        self.start = program.init()
        self.servers: list[Server] = []
        self.reached: dict[int, ShardState] = {}
        self.failed: list[str] = []
        model = self.cluster.consistency
        self.clocks = self.cluster.clocks(self.experiment.total_steps)
        for layout, part in zip(
            self.sharded.layouts, self.sharded.parted(self.start, 0), strict=True
        ):
            shard = ServerShard(
                layout, model, self.sharded.transform(layout), part.params, part.optimizer
            )
            state = RangeState(Clocks(self.cluster.clients))
            order = None if log is None else OrderLog(log / f"server_{layout.server}.jsonl")
            codes = next((one for one in self.sharded.codes if one.layout is layout), None)
            begin = Server
            if self.cluster.secure:
                begin = partial(SecureServer, **self.cluster.secure, failed=self.failed.append)
            server = begin(shard, model, state, log=order, due=[self.clocks],
                            codes=codes, reached=partial(self.save, layout.server))  # fmt: skip
            for client in range(self.cluster.clients):
                server.join(client)
            self.servers.append(server)
        self.racks = [self._rack(*one, log) for one in enumerate(self.cluster.racks)]
        self.told: list[tuple[int, Any]] = []
        self.measured: list[Measured] = []
        self._lock = threading.Lock()

    def save(self, server: int, reached: ShardState) -> None:
        self.reached[server] = reached

    def _wires(self, services: Sequence[Reception]) -> list[LocalWire]:
        given = zip(services, self.sharded.layouts, self.sharded.pushes, strict=True)
        return [
            LocalWire(service, partial(spec_for, push=push, shard=layout.spec))
            for service, layout, push in given
        ]

    def _rack(
        self, number: int, workers: tuple[int, ...], log: Path | None = None
    ) -> list[Aggregator]:
        """Return the aggregators of a rack, one for each server."""
        codes = self.sharded.codes or [None] * self.cluster.servers
        given = zip(self.sharded.layouts, self._wires(self.servers), codes, strict=True)
        model, racks = self.cluster.consistency, len(self.cluster.racks)

        def gone(at: int, client: int) -> None:
            self.servers[at].leave(client)
            self.servers[at].admit(client + racks)

        def order(at: int) -> OrderLog | None:
            return None if log is None else OrderLog(log / f"rack_{number}.server_{at}.jsonl")

        return [
            Aggregator(layout, model, wire, count(number, racks), workers, codes=coded,
                       gone=partial(gone, at), log=order(at))
            for at, (layout, wire, coded) in enumerate(given)
        ]  # fmt: skip

    def worker(self, slot: int, stop: int | None = None, number: int | None = None) -> Worker:
        shares = self.cluster.shares(32)
        loader = self.experiment.loader.part(sum(shares[:slot]), shares[slot])
        program = self.sharded.share(loader, 1)
        rack = self.cluster.rack_of(slot)
        wires = self._wires(self.servers if rack is None else self.racks[rack])
        number = slot if number is None else number
        given = (number, self.cluster.of_workers, self.sharded.layouts, wires)
        begin = partial(MaskingClient, **self.cluster.secure) if self.cluster.secure else Client
        client = begin(*given, codes=self.sharded.codes, patience=Timeouts(60.0))

        def measure(clock: int, sums: Measured) -> None:
            with self._lock:
                self.measured.append(sums)

        def tell(one: Any) -> None:
            with self._lock:
                self.told.append((slot, one))

        given = (client, self.sharded, program, loader, slot, stop or self.clocks)
        return Worker(*given, measure, tell)

    def run(self) -> None:
        def work(slot: int) -> None:
            worker = self.worker(slot)
            with worker.client:
                worker.run()
            self.leave(slot, slot)

        at_once(work, self.cluster.workers)
        self.close()

    def leave(self, client: int, slot: int) -> None:
        """Tell the aggregators of a client's rack that the client has left and will not return."""
        for one in self.racks[rack] if (rack := self.cluster.rack_of(slot)) is not None else ():
            one.leave(client)

    def close(self) -> None:
        for one in (one for rack in self.racks for one in rack):
            one.close()
        for server in self.servers:
            server.close()

    @property
    def shards(self) -> list[ShardState]:
        return [
            ShardState(
                server.state.clocks.floor,
                server.state.clocks.version,
                server.shard.params,
                server.shard.kept(),
            )
            for server in self.servers
        ]

    def state(self) -> Any:
        """Return the program's state at the end of the run, on the host."""
        step = self.experiment.total_steps
        return jax.tree.map(np.asarray, self.sharded.whole(self.shards, self.start, step))


def replay_of(run: Training, workers: list[Any], folder: Path) -> Replay:
    """Return the replay of a finished run from the logs of its servers.

    Args:
      workers: the worker of each client, by the client's number.
      folder: the folder with the logs.
    """
    steps, servers = run.cluster.local_steps, range(len(run.servers))

    def batches(client: int, clock: int) -> list[Any]:
        return [workers[client].loader.batch(clock * steps + step) for step in range(steps)]

    return Replay(
        run.sharded,
        run.sharded.parted(run.start, 0),
        [RangeState(Clocks(run.cluster.clients))] * len(run.servers),
        [read_order(folder / f"server_{at}.jsonl") for at in servers],
        lambda client: computation(run.sharded, workers[client].program, workers[client].slot),
        batches,
        racks=[
            [read_order(folder / f"rack_{at}.server_{to}.jsonl") for at in range(len(run.racks))]
            for to in servers
        ],
        due=run.clocks,
    )
