"""The function that each host of the lab runs: the first a server, the others a worker each.

With "ring" in the task all hosts are workers, and sum their gradients by an all-reduce.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.collectives.program import compile_local, split
from benchmarks.core.lab import Lab
from benchmarks.param_server.serving import central, listening, served, shard_of, wire_to
from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, Split, build_mesh
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.live.client import Client, Timeouts

FIRST_PORT = 9920
RING = "ring"
LATE_SECONDS = 60.0
"""A worker that waits so long gives up."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
      consistency: of the servers, as in a config, or {"type": "ring"}.
      step_seconds: what each worker sleeps in place of computing.
    """

    name: str
    consistency: dict[str, str | int]
    step_seconds: tuple[float, ...]

    @property
    def workers(self) -> int:
        return len(self.step_seconds)

    def cluster(self) -> Cluster:
        """The workers and what they have agreed on."""
        return Cluster.model_validate({"workers": self.workers, "consistency": self.consistency})


@dataclass(frozen=True)
class Task:
    """The task of all hosts.

    Attributes:
      floats: parameters, float32.
      seconds: of one case.
    """

    hosts: int
    cases: tuple[Case, ...]
    floats: int
    seconds: float


def start(floats: int) -> dict[str, np.ndarray]:
    """The parameters, in one array."""
    return {"w": np.zeros(floats, np.float32)}


def serve(task: Task, case: Case, host: str, port: int) -> list[float]:
    """The server of a case: when each of its updates was made, since the first."""
    params, model = start(task.floats), case.cluster().consistency
    times: list[float] = []
    first = threading.Event()

    def applied(version: int, square: float) -> None:
        times.append(time.perf_counter())
        first.set()

    shard = shard_of(central(params), model, params, 0.1)
    with listening(served(shard, model, case.workers, applied), host, port):
        if not first.wait(LATE_SECONDS):
            raise RunError(f"{case.name}: no worker has pushed within {LATE_SECONDS:g} s")
        time.sleep(task.seconds + 2)
    return [at - times[0] for at in times if at - times[0] <= task.seconds]


def work(task: Task, case: Case, number: int, address: str) -> None:
    """One worker of a case, until its time is over."""
    layout, model = central(start(task.floats)), case.cluster().consistency
    wire = wire_to(address, layout.spec)
    change = np.full(task.floats, 1e-6, np.float32)
    begun = threading.Event()

    def steps() -> None:
        with suppress(RunError):  # the last read waits for workers that have ended
            client.read()
            begun.set()
            while True:
                time.sleep(case.step_seconds[number])
                client.push([change])
                client.read()

    patience = Timeouts(LATE_SECONDS, LATE_SECONDS)
    with Client(number, model, [layout], [wire], patience=patience) as client:
        threading.Thread(target=steps, daemon=True).start()
        if not begun.wait(LATE_SECONDS):
            raise RunError(f"{case.name}: there is no server at {address}")
        time.sleep(task.seconds + 1)


def ring(task: Task, case: Case) -> list[float]:
    """One worker of an all-reduce: when each of its steps ended, since the first."""
    mesh = build_mesh(MeshConfig(data=Split(dcn=1, ici=task.hosts)))
    mine = np.ones((1, task.floats), np.float32)
    shape = (mesh.size, task.floats)
    given = jax.make_array_from_process_local_data(split(mesh), mine, shape)
    run = compile_local(partial(jax.lax.pmean, axis_name=mesh.axis_names), mesh, given)
    jax.block_until_ready(run(given))
    multihost_utils.sync_global_devices("ready")
    pause, times = case.step_seconds[jax.process_index()], [time.perf_counter()]
    for _ in range(_ring_steps(task, case)):
        time.sleep(pause)
        given = run(given)
        jax.block_until_ready(given)
        times.append(time.perf_counter())
    return [at - times[0] for at in times]


def _ring_steps(task: Task, case: Case) -> int:
    return max(8, int(task.seconds / (4 * max(case.step_seconds))))


@dataclass(frozen=True)
class Updates:
    """Seconds at which each update of a case was made, since the first."""

    case: str
    times: tuple[float, ...]


def play(task: Task) -> list[Updates]:
    """Play all cases; the first host knows the times."""
    host, lab = jax.process_index(), Lab(sites=task.hosts)
    found: list[Updates] = []
    for place, case in enumerate(task.cases):
        port, address = FIRST_PORT + place, lab.address(0)
        if case.consistency["type"] == RING:
            found.append(Updates(case.name, tuple(ring(task, case))))
        elif host == 0:
            found.append(Updates(case.name, tuple(serve(task, case, address, port))))
        else:
            work(task, case, host - 1, f"{address}:{port}")
    return found
