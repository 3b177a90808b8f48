"""A race of train steps: a server of jaxdist against a parameter server written with Ray."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.core.harness import Sample
from benchmarks.core.report import Figure
from benchmarks.param_server.peer import __main__ as peer
from benchmarks.param_server.serving import central, listening, served, shard_of, wire_to
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import joined_shards
from jaxdist.runtime.environment import plan_tunables, python_module

MODULE = "benchmarks.param_server.race"
WORKERS, STEPS, ROUNDS = 2, 60, 3
LOST_SECONDS = 300


def figures(python: str) -> list[Figure]:
    """Compare the step times of jaxdist and of Ray, measured in turn.

    Args:
      python: a Python that has ray, jax and numpy.

    Raises:
      RunError: a process fails or takes too long.
    """
    ours: list[float] = []
    rays: list[float] = []
    for _ in range(ROUNDS):
        ours.append(statistics.median(_ours()))
        rays.append(statistics.median(_rays(python)))
    return [
        Figure.compare(
            "steps of the same model in Ray's time of one",
            Sample(tuple(rays)),
            Sample(tuple(ours)),
            ">= 2",
            f"the first column is Ray's, the second ours, the ratio Ray's over ours: an actor that "
            f"holds the weights as Ray's documentation has it, beside one server of ours in rounds "
            f"(bsp); {WORKERS} workers, processes of their own, an MLP of 1.9 million parameters; "
            f"medians of {STEPS} steps, {ROUNDS} times in turn",
        )
    ]


def _run(command: list[str]) -> list[float]:
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    # For a fair race, both sides get the malloc settings with which `jaxdist` starts itself.
    if (tunables := plan_tunables(environ, platform.libc_ver()[0])) is not None:
        environ["GLIBC_TUNABLES"] = tunables
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LOST_SECONDS, env=environ
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"not done after {LOST_SECONDS} s: `{' '.join(command)}`") from None
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])
    last = done.stderr.strip().rpartition("\n")[2]
    raise RunError(f"exit code {done.returncode}: {last}; run `{' '.join(command)}` by hand")


def _rays(python: str) -> list[float]:
    return _run([python, str(Path(peer.__file__)), str(WORKERS), str(STEPS)])


def _ours() -> list[float]:
    return _run(python_module(MODULE, "server"))


def server() -> None:
    """Run the server, with its workers as processes, and print the seconds of each step."""
    weights, model = peer.initial(), BSP()
    times: list[float] = []
    serving = served(
        shard_of(central(weights), model, weights, peer.RATE),
        model,
        WORKERS,
        lambda version, square: times.append(time.perf_counter()),
    )
    with listening(serving) as port:
        command = python_module(MODULE, "worker")
        team = [subprocess.Popen([*command, str(number), str(port)]) for number in range(WORKERS)]
        for process in team:
            process.wait(LOST_SECONDS)
    print(json.dumps(np.diff(times[peer.WARMUP - 1 :]).tolist()))


def worker(number: int, port: int) -> None:
    """Run one worker for all steps."""
    weights = peer.initial()
    layout, shapes = central(weights), {name: array.shape for name, array in weights.items()}
    wire = wire_to(port, layout.spec, layout.spec.size_bytes)
    x, labels = peer.batch(number)
    with Client(number, BSP(), [layout], [wire]) as client:
        while client.clock < peer.WARMUP + STEPS:
            found = peer.gradient(joined_shards([layout], client.read(), shapes), x, labels)
            client.push([layout.flatten({n: np.asarray(g) for n, g in found.items()})])
        client.drain()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        server()
    else:
        worker(int(sys.argv[2]), int(sys.argv[3]))
