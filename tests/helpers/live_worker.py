"""A worker in a process of its own, until it is killed: `python live_worker.py CLIENT PORT LENGTH`.

It pushes whole numbers, and prints its first clock, then its clock whenever all that it pushed is
acknowledged.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np

from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import Layout, Piece
from jaxdist.param_server.placement.ranges import Range
from jaxdist.param_server.wire.frames import spec_for
from jaxdist.param_server.wire.rpc import RpcWire

PAUSE_SECONDS = 0.003
TOKEN = "0123456789abcdef" * 4
WHOLE = Asynchronous(gradient_weight="whole")


def delta(client: int, clock: int, length: int) -> np.ndarray:
    """Whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng([client, clock]).integers(-4, 5, length).astype(np.float32)


def main(number: int, port: int, length: int) -> None:
    piece = Piece(Range("w", 0, length, 4 * length), (length,), 0)
    layout = Layout(0, np.dtype(np.float32), (piece,))
    wire = RpcWire(
        f"127.0.0.1:{port}", TOKEN, partial(spec_for, push=layout.spec, shard=layout.spec)
    )
    with Client(number, WHOLE, [layout], [wire]) as client:
        client.read()
        print(client.clock, flush=True)
        while True:
            client.read()
            client.push([delta(number, client.clock, length)])
            time.sleep(PAUSE_SECONDS)  # two cores are to start other processes meanwhile
            if client.clock % 5 == 0:
                client.drain()
                print(client.clock, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
