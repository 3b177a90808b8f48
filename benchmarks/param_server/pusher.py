"""A program that runs one worker until it is killed.

`python -m benchmarks.param_server.pusher CLIENT PORT LENGTH` pushes integers to a server. It prints
its first clock. After every fifth push it waits until all pushes are acknowledged, and prints its
clock.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from benchmarks.param_server.serving import wire_to
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import ShardLayout, ShardPiece
from jaxdist.param_server.placement.ranges import Range
from jaxdist.runtime.environment import python_module

PAUSE_SECONDS = 0.003
WHOLE = Asynchronous(gradient_weight="whole")


def delta(client: int, clock: int, length: int) -> np.ndarray:
    """Return random integers, whose float32 sums are exact in any order."""
    return np.random.default_rng([client, clock]).integers(-4, 5, length).astype(np.float32)


def layout_of(length: int) -> ShardLayout:
    """Return the layout of a single server, with one array."""
    piece = ShardPiece(Range("w", 0, length, 4 * length), (length,), 0, np.dtype(np.float32))
    return ShardLayout(0, np.dtype(np.float32), (piece,))


def started(client: int, port: int, length: int) -> subprocess.Popen[str]:
    """Start the program for a client, with its standard output as a pipe."""
    command = python_module(__spec__.name, *map(str, (client, port, length)))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(number: int, port: int, length: int) -> None:
    layout = layout_of(length)
    with Client(number, WHOLE, [layout], [wire_to(port, layout.spec)]) as client:
        client.read()
        print(client.clock, flush=True)
        while True:
            client.read()
            client.push([delta(number, client.clock, length)])
            time.sleep(PAUSE_SECONDS)  # leaves time on few cores for new processes to start
            if client.clock % 5 == 0:
                client.drain()
                print(client.clock, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
