"""The function that each host of the lab runs: the first host is a server, the others are workers.

In a case of type "ring" all hosts are workers, which sum their gradients by an all-reduce.
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
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts

FIRST_PORT = 9920
RING = "ring"
LATE_SECONDS = 60.0
"""The seconds after which a worker that waits gives up."""


@dataclass(frozen=True)
class Case:
    """A run to time: a consistency of servers, or an all-reduce.

    Attributes:
      name: the name of the case.
      consistency: the consistency of the servers as in a config, or {"type": "ring"}.
      step_seconds: for each worker, the seconds that it sleeps instead of computing.
    """

    name: str
    consistency: dict[str, str | int]
    step_seconds: tuple[float, ...]

    @property
    def workers(self) -> int:
        return len(self.step_seconds)

    def cluster(self) -> Cluster:
        """Return the settings of the case's cluster: its workers and consistency."""
        return Cluster.model_validate({"workers": self.workers, "consistency": self.consistency})


@dataclass(frozen=True)
class Task:
    """The task that every host runs.

    Attributes:
      hosts: the number of hosts.
      cases: the runs, one after another.
      floats: the number of float32 parameters.
      seconds: the time of one case.
    """

    hosts: int
    cases: tuple[Case, ...]
    floats: int
    seconds: float


def start(floats: int) -> dict[str, np.ndarray]:
    """Return the parameters, in one array."""
    return {"w": np.zeros(floats, np.float32)}


def serve(task: Task, case: Case, host: str, port: int) -> list[float]:
    """Run the server of a case; return the seconds from its first update to each update."""
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
        # Workers end a second earlier, so that they do not lose their server.
        time.sleep(task.seconds + 2)
    return [at - times[0] for at in times if at - times[0] <= task.seconds]


def work(task: Task, case: Case, number: int, address: str) -> None:
    """Run one worker of a case until the time of the case is over."""
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
    """Run one worker of an all-reduce; return the seconds from its start to each step's end."""
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
    """The seconds from the first update of a case to each of its updates."""

    case: str
    times: tuple[float, ...]


def play(task: Task) -> list[Updates]:
    """Run all cases; the first host returns the times."""
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
