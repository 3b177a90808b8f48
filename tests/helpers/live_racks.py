"""Racks in this process: aggregators, their servers, and clients of the aggregators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from live_servers import SECONDS, TOKEN, Servers

from benchmarks.param_server.local_wire import LocalWire
from jaxdist.param_server.aggregation import Racks
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.aggregator import Aggregator
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.protocol.rack import WITHIN
from jaxdist.wire.contract import Wire
from jaxdist.wire.frames import spec_for
from jaxdist.wire.rpc import RpcServer, RpcWire

Around = Callable[[Wire], Wire]


class Racked:
    """Servers and the aggregators of racks, over gRPC or within the process.

    Args:
      around: a function that wraps every wire.
    """

    def __init__(
        self,
        model: Consistency,
        workers: int,
        size: int,
        *,
        rpc: bool = False,
        around: Around = lambda wire: wire,
        retry: float = 30.0,
        **servers: Any,
    ) -> None:
        self.racks = Racks(size=size).racks(range(workers))
        self.root = Servers(model, len(self.racks), rpc=rpc, **servers)
        self.layouts, self.around, self.retry = self.root.layouts, around, retry
        for rack in range(len(self.racks)):
            for server in self.root.servers:
                server.admit(rack + len(self.racks))
        self.gone: list[tuple[int, int]] = []
        self.failed: list[str] = []
        self.aggregators = [
            [
                Aggregator(
                    layout,
                    model,
                    around(wire),
                    count(rack, len(self.racks)),
                    team,
                    retry_seconds=retry,
                    gone=partial(self._gone, at),
                    failed=self.failed.append,
                )
                for at, (layout, wire) in enumerate(zip(self.layouts, self.root.wires, strict=True))
            ]
            for rack, team in enumerate(self.racks)
        ]
        self.rpcs = [[RpcServer(one, TOKEN) for one in own] for own in self.aggregators if rpc]

    def _gone(self, server: int, number: int) -> None:
        self.gone.append((server, number))
        self.root.servers[server].leave(number)
        self.root.servers[server].admit(number + 2 * len(self.racks))

    def wires(self, rack: int) -> list[Wire]:
        specs = [partial(spec_for, push=one.spec, shard=one.spec) for one in self.layouts]
        if not self.rpcs:
            return [LocalWire(*pair) for pair in zip(self.aggregators[rack], specs, strict=True)]
        ports = [rpc.port for rpc in self.rpcs[rack]]
        pairs = zip(ports, specs, strict=True)
        return [RpcWire(f"127.0.0.1:{port}", TOKEN, spec) for port, spec in pairs]

    def client(self, number: int, rack: int | None = None, deadline: float = SECONDS) -> Client:
        if rack is None:
            rack = next(at for at, team in enumerate(self.racks) if number in team)
        wires: Sequence[Wire] = [self.around(wire) for wire in self.wires(rack)]
        patience = Timeouts(deadline, self.retry)
        through = f"aggregator {rack} of "
        return Client(number, WITHIN, self.layouts, wires, patience=patience, through=through)

    def leave(self, worker: int, rack: int) -> None:
        for one in self.aggregators[rack]:
            one.leave(worker)

    def admit(self, worker: int, rack: int) -> None:
        for one in self.aggregators[rack]:
            one.admit(worker)

    def __enter__(self) -> Racked:
        return self

    def __exit__(self, *exception: object) -> None:
        for rpc in (rpc for own in self.rpcs for rpc in own):
            rpc.close()
        for one in (one for own in self.aggregators for one in own):
            one.close()
        self.root.__exit__()
