"""Helpers of the benches that start one server of given parameters, and connect to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import optax

from benchmarks.param_server.receivers import TOKEN
from jaxdist.param_server.consistency.contract import Clocks, Consistency
from jaxdist.param_server.live.layout import ShardLayout, layouts
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.placement.central import Central
from jaxdist.param_server.placement.ranges import placeable_tensors
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.wire.contract import Spec
from jaxdist.wire.frames import spec_for
from jaxdist.wire.rpc import RpcServer, RpcWire

LOOPBACK = "127.0.0.1"


def central(params: Mapping[str, np.ndarray]) -> ShardLayout:
    """Return the layout of one server that holds all parameters."""
    (layout,) = layouts(Central(range_bytes=None).place(placeable_tensors(params), [0]), params)
    return layout


def shard_of(
    layout: ShardLayout, model: Consistency, params: Mapping[str, np.ndarray], rate: float
) -> ServerShard:
    """Return a server's shard of some parameters, under plain gradient descent."""
    sgd = optax.with_extra_args_support(optax.sgd(rate))
    return ServerShard(layout, model, sgd, layout.flatten(params))


def served(
    shard: ServerShard,
    model: Consistency,
    workers: int,
    applied: Callable[[int, float], None] = lambda version, square: None,
    kind: type[Server] = Server,
) -> Server:
    """Return a server that `workers` workers have joined; it calls `applied` at each update."""
    server = kind(shard, model, RangeState(Clocks(workers)), applied=applied)
    for client in range(workers):
        server.join(client)
    return server


@contextmanager
def listening(server: Server, host: str = LOOPBACK, port: int = 0) -> Iterator[int]:
    """Serve until the context ends, and yield the port."""
    rpc = RpcServer(server, TOKEN, host=host, port=port)
    try:
        yield rpc.port
    finally:
        rpc.close()
        server.close()


def wire_to(address: int | str, spec: Spec, shared_bytes: int = 0) -> RpcWire:
    """Return a wire to a server, given its port on this machine or its address."""
    place = f"{LOOPBACK}:{address}" if isinstance(address, int) else address
    both = partial(spec_for, push=spec, shard=spec)
    return RpcWire(place, TOKEN, both, shared_bytes=shared_bytes)
