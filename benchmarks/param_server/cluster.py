"""Servers and workers in this process that exchange messages over gRPC: bytes and rates."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from benchmarks.core.report import Figure
from benchmarks.param_server.receivers import TOKEN
from benchmarks.param_server.serving import served, shard_of, wire_to
from jaxdist.param_server.aggregation import Direct, Racks
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.aggregator import Aggregator
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import ShardLayout, layouts
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.ranges import placeable_tensors
from jaxdist.param_server.protocol.rack import WITHIN
from jaxdist.wire.contract import Service
from jaxdist.wire.rpc import RpcServer, RpcWire

STEP_SECONDS = 0.02
SLOWER = 10
BOUND = 2
STEPS = 5
DIRECT = Direct()


@dataclass
class Played:
    """Servers and their workers.

    Attributes:
      servers, layouts: the servers, and the layout of each.
      clients: the client of each worker.
      clocks: the number of clocks of each worker so far.
      leads: for each read, the number of clocks by which the reading worker was ahead of the
        slowest worker, computed from the read parameters.
    """

    servers: Sequence[Server]
    layouts: Sequence[ShardLayout]
    clients: Sequence[Client]
    clocks: list[int]
    leads: list[int]


@contextmanager
def played(
    model: Consistency,
    workers: int,
    servers: int,
    params: dict[str, np.ndarray],
    range_bytes: int,
    aggregation: Direct | Racks = DIRECT,
) -> Iterator[Played]:
    """Start servers that hold these parameters, and a client for each worker, over gRPC."""
    placement = Balanced(range_bytes=range_bytes).place(placeable_tensors(params), range(servers))
    shards = layouts(placement, params)
    racks = aggregation.racks(range(workers))
    with ExitStack() as stack:
        found: list[Server] = []
        for layout in shards:
            shard = shard_of(layout, model, params, 1.0)
            found.append(served(shard, model, len(racks) or workers))
            stack.callback(found[-1].close)
        wires = _wires(stack, found, shards)
        ways = dict.fromkeys(range(workers), wires)
        for number, rack in enumerate(racks):
            ways |= dict.fromkeys(rack, _aggregated(stack, model, number, rack, wires, shards))
        patience = Timeouts(120.0, 60.0)
        kept = WITHIN if racks else model
        clients = [
            stack.enter_context(Client(number, kept, shards, ways[number], patience=patience))
            for number in range(workers)
        ]
        yield Played(found, shards, clients, [0] * workers, [])


def _wires(
    stack: ExitStack, services: Sequence[Service], shards: Sequence[ShardLayout]
) -> list[RpcWire]:
    """Return a wire to each service, each with its own port."""
    wires: list[RpcWire] = []
    for service, layout in zip(services, shards, strict=True):
        rpc = RpcServer(service, TOKEN)
        stack.callback(rpc.close)
        wires.append(wire_to(rpc.port, layout.spec))
    return wires


def _aggregated(
    stack: ExitStack,
    model: Consistency,
    number: int,
    workers: tuple[int, ...],
    wires: Sequence[RpcWire],
    shards: Sequence[ShardLayout],
) -> list[RpcWire]:
    """Return the wires to a rack's aggregators, one for each server."""
    found: list[Aggregator] = []
    for layout, wire in zip(shards, wires, strict=True):
        found.append(Aggregator(layout, model, wire, count(number), workers))
        stack.callback(found[-1].close)
    return _wires(stack, found, shards)


def traffic(workers: int = 4, servers: int = 4) -> Figure:
    """Count the bytes that the server with the most bytes receives in a step of all workers."""
    params = {"w": np.zeros((64, 1024), np.float32)}
    size = params["w"].nbytes
    fullest = max(_received(workers, servers, params, size // (4 * servers), DIRECT))
    return Figure(
        f"bytes into the fullest of {servers} servers in a step",
        fullest / STEPS,
        workers * size / servers,
        "<= 1",
        "bytes",
        f"{workers} workers, {size} bytes of parameters; the reference is N S / shards. Frames add "
        "92 bytes to each MiB",
    )


def racks(workers: int = 4, size: int = 2) -> Figure:
    """Count the bytes that all servers receive in a step of all workers, with and without racks."""
    params = {"w": np.zeros((64, 1024), np.float32)}
    without, with_racks = (
        sum(_received(workers, 2, params, 2**15, aggregation)) / STEPS
        for aggregation in (DIRECT, Racks(size=size))
    )
    return Figure(
        f"root ingress: without racks / with racks of size {size} ({workers} workers)",
        without,
        with_racks,
        f">= {size}",
        "bytes",
        f"of a step, {params['w'].nbytes} bytes of parameters on 2 servers, counted by them; the "
        "ratio is the rack's size",
    )


def _received(
    workers: int,
    servers: int,
    params: dict[str, np.ndarray],
    range_bytes: int,
    aggregation: Direct | Racks,
) -> list[int]:
    """Return the bytes of payloads that each server received in `STEPS` rounds."""
    with played(BSP(), workers, servers, params, range_bytes, aggregation) as run:

        def work(client: Client) -> None:
            for _ in range(STEPS):
                client.push(client.read())
            client.drain()

        _together([partial(work, client) for client in run.clients])
        return [server.counters.received_bytes for server in run.servers]


def slow_worker(workers: int = 4, seconds: float = 4.0) -> list[Figure]:
    """Make one worker ten times slower, and measure the rate and the lead of the other workers."""
    alone = _rates(Asynchronous(), [1.0] * workers, seconds)
    factors = [1.0] * (workers - 1) + [float(SLOWER)]
    beside = _rates(Asynchronous(), factors, seconds)
    bounded = _rates(SSP(bound=BOUND), factors, seconds)
    healthy = workers - 1
    rate = "clocks/s"
    return [
        Figure(
            f"async, one of {workers} workers {SLOWER}x slow: rate of the others",
            sum(beside.clocks[:healthy]) / seconds,
            sum(alone.clocks[:healthy]) / seconds,
            ">= 0.9",
            rate,
            f"beside the same workers when all are healthy; a clock is {STEP_SECONDS:g} s of sleep",
        ),
        Figure(
            f"ssp {BOUND}, one of {workers} workers {SLOWER}x slow: largest lead at a read",
            max(bounded.leads),
            BOUND,
            "<= 1",
            "clocks",
            f"over {len(bounded.leads)} reads, counted in the parameters that came",
        ),
    ]


def _rates(model: Consistency, factors: Sequence[float], seconds: float) -> Played:
    """Run workers with these factors on their step time; each worker counts its own pushes.

    A worker counts in its own row of the parameters, so that each read shows all workers' clocks.
    """
    workers = len(factors)
    params = {"w": np.zeros((workers, 1024), np.float32)}
    share = 1 / workers  # the rate of an update that is applied on arrival
    with played(model, workers, 1, params, 2**20) as run:
        end = threading.Event()

        def work(number: int) -> None:
            client, mine = run.clients[number], np.zeros((workers, 1024), np.float32)
            # The server subtracts `share` times a push, so that each push adds 1.
            mine[number] = -1 / share
            while not end.is_set():
                (read,) = client.read()
                applied = read.reshape(workers, 1024)[:, 0].round()
                run.leads.append(client.clock - int(applied.min()))
                time.sleep(STEP_SECONDS * factors[number])
                client.push([mine.reshape(-1)])
                # A push that is done after the end does not count.
                run.clocks[number] += not end.is_set()

        timer = threading.Timer(seconds, end.set)
        timer.start()
        _together([partial(work, number) for number in range(workers)], end)
    return run


def _together(works: Sequence[partial[None]], end: threading.Event | None = None) -> None:
    """Run each function in a thread; raise the first error here, which also sets `end`."""
    errors: list[BaseException] = []

    def guarded(work: partial[None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            if end is not None:
                end.set()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
