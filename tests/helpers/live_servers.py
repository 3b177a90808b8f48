"""Servers in this process, wires to the servers, and a network that loses and copies messages."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import optax

from benchmarks.param_server.local_wire import LocalWire
from benchmarks.param_server.receivers import TOKEN
from jaxdist.param_server.consistency.contract import Clocks, Consistency
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import joined_shards, layouts
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.order import OrderLog
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.ranges import placeable_tensors
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.wire.contract import Envelope, Hear, Session, Wire
from jaxdist.wire.frames import spec_for
from jaxdist.wire.rpc import RpcServer, RpcWire
from jaxdist.wire.security import Tls

PARAMS = {"w": np.zeros((10, 4), np.float32), "b": np.zeros(3, np.float32)}
WHOLE_STEPS = optax.with_extra_args_support(optax.sgd(1.0))
SECONDS = 30.0


class Servers:
    """Servers that hold given parameters; with `rpc`, clients reach the servers by gRPC."""

    def __init__(
        self,
        model: Consistency,
        workers: int,
        *,
        params: Mapping[str, np.ndarray] = PARAMS,
        count: int = 2,
        transform: optax.GradientTransformationExtraArgs = WHOLE_STEPS,
        rpc: bool = False,
        tls: Tls | None = None,
        shared_bytes: int = 0,
        log: Path | None = None,
    ) -> None:
        self.params, self.model = dict(params), model
        placement = Balanced(range_bytes=48).place(placeable_tensors(self.params), range(count))
        self.layouts = layouts(placement, self.params)
        self.servers = [
            Server(
                ServerShard(layout, model, transform, layout.flatten(self.params)),
                model,
                RangeState(Clocks(workers)),
                log=None if log is None else OrderLog(log / f"server_{layout.server}.jsonl"),
            )
            for layout in self.layouts
        ]
        for server in self.servers:
            for client in range(workers):
                server.join(client)
        self.rpcs = [RpcServer(one, TOKEN, tls=tls) for one in self.servers] if rpc else []
        specs = [partial(spec_for, push=one.spec, shard=one.spec) for one in self.layouts]
        self.wires: list[Wire] = [
            LocalWire(one, spec) for one, spec in zip(self.servers, specs, strict=True)
        ]
        if rpc:
            self.wires = [
                RpcWire(f"127.0.0.1:{one.port}", TOKEN, spec, tls, shared_bytes)
                for one, spec in zip(self.rpcs, specs, strict=True)
            ]

    def client(self, number: int, *, wires: Sequence[Wire] = (), retry: float = 30.0) -> Client:
        patience = Timeouts(SECONDS, retry)
        return Client(number, self.model, self.layouts, wires or self.wires, patience=patience)

    def params_now(self) -> dict[str, np.ndarray]:
        shapes = {name: array.shape for name, array in self.params.items()}
        return joined_shards(self.layouts, [one.shard.params for one in self.servers], shapes)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        for rpc in self.rpcs:
            rpc.close()
        for server in self.servers:
            server.close()


def at_once(work: Callable[[int], None], workers: int) -> None:
    """Run `work(number)` in a thread for each worker, and raise the first error of a thread."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@dataclass
class Faults:
    """The faults of a network, which loses, copies or delays a tenth of the envelopes.

    Attributes:
      seen: the number of envelopes that were sent.
    """

    seed: int
    seen: int = 0
    done: dict[str, int] = field(default_factory=lambda: {"lost": 0, "doubled": 0, "held": 0})

    def __post_init__(self) -> None:
        self._random, self._lock = random.Random(self.seed), threading.Lock()
        self._held: list[tuple[int, Callable[[], None]]] = []

    def carry(self, deliver: Callable[[], None]) -> None:
        with self._lock:
            self.seen += 1
            due = [one for one in self._held if one[0] <= self.seen]
            self._held = [one for one in self._held if one[0] > self.seen]
            draw = self._random.random()
            copies = 1
            if draw < 0.03:
                copies, kind = 0, "lost"
            elif draw < 0.06:
                copies, kind = 2, "doubled"
            elif draw < 0.10:
                copies, kind = 0, "held"
                self._held.append((self.seen + self._random.randint(1, 12), deliver))
            if draw < 0.10:
                self.done[kind] += 1
        for _ in range(copies):
            deliver()
        for _, late in due:
            late()


@dataclass
class FaultyWire:
    """A wire whose envelopes suffer faults in both directions."""

    wire: Wire
    faults: Faults

    def open(self, hear: Hear, ended: Callable[[str], None]) -> Session:
        def heard(envelope: Envelope) -> None:
            self.faults.carry(lambda: hear(envelope))

        return _FaultySession(self.wire.open(heard, ended), self.faults)


@dataclass
class _FaultySession:
    session: Session
    faults: Faults

    def send(self, envelope: Envelope) -> None:
        self.faults.carry(lambda: self.session.send(envelope))

    def close(self) -> None:
        self.session.close()
