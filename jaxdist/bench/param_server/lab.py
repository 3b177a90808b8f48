"""Runs on slow links, real time: servers and workers beside what the simulator says of them.

One process a host: a server, and three workers that sleep in place of computing. And the question
that comes before: a server, or an all-reduce? Two points of the answer are run for real too.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from jaxdist.bench.collectives.lab import MESSAGE_SECONDS, one_device
from jaxdist.bench.core import lab
from jaxdist.bench.core.lab import Lab, LabLink
from jaxdist.bench.core.report import Figure
from jaxdist.bench.param_server.host import FOUND, RING, Case, Task, start
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.simulator.config import Link, SimulationConfig
from jaxdist.param_server.simulator.problem import Arrays, Computed, Sgd
from jaxdist.param_server.simulator.run import simulate
from jaxdist.runtime import hardware

FLOATS = 2**18
WORKERS = 3
STEP_SECONDS, SLOWER = 0.1, 2.0
WARMUP = 4
"""Steps that are not counted."""
EQUAL = (STEP_SECONDS,) * WORKERS
STRAGGLER = (*EQUAL[:-1], SLOWER * STEP_SECONDS)
MODELS_SHOWN: Mapping[str, dict[str, str | int]] = {
    "bsp": {"type": "bsp"},
    "ssp 2": {"type": "ssp", "bound": 2},
    "async": {"type": "async"},
}
SPEEDS: Mapping[str, tuple[float, ...]] = {"equal": EQUAL, "one 2x slow": STRAGGLER}
LINKS = (LabLink(100e6), LabLink(1e9))
RUN_SECONDS: Mapping[float, float] = {100e6: 16.0, 1e9: 8.0}
GOAL = "<= 1.2"
TIMEOUT_SECONDS = 600.0


class Nothing:
    """A problem whose gradients take no time and change nothing, of so many parameters."""

    def __init__(self, floats: int) -> None:
        self.start: Arrays = start(floats)

    def gradient(self, params: Arrays, worker: int, step: int) -> Computed:
        return Computed(self.start)

    def loss(self, params: Arrays) -> float:
        return 0.0


def figures() -> list[Figure]:
    """Step times of real runs beside the simulator's, and an all-reduce beside both.

    Raises:
      RunError: a host fails.
    """
    reason = lab.unavailable(Lab(sites=1 + WORKERS))
    if reason:
        return [Figure("slow-link lab", math.nan, math.nan, unit="", note=f"skipped: {reason}")]
    return [figure for link in LINKS for figure in _on(link)]


def _on(link: LabLink) -> list[Figure]:
    seconds = RUN_SECONDS[link.bits_per_s]
    rate = f"{link.bits_per_s / 1e6:g} Mbit/s"
    cases = [
        Case(f"{name}, {speeds}", model, steps)
        for speeds, steps in SPEEDS.items()
        for name, model in MODELS_SHOWN.items()
    ]
    real = measured(Lab(sites=1 + WORKERS, across=link), cases, seconds)
    found = [
        _beside(
            f"{case.name}, {rate}",
            step_seconds(real[case.name], case.cluster().updates_per_step),
            simulated(case, link, seconds),
            "beside the simulator's",
        )
        for case in cases
    ]
    rings = [Case(f"all-reduce, {name}", {"type": RING}, steps) for name, steps in SPEEDS.items()]
    summed = measured(Lab(sites=WORKERS, across=link), rings, seconds)
    found += [
        _beside(
            f"{case.name}, {rate}",
            step_seconds(summed[case.name], 1),
            max(case.step_seconds) + all_reduce_seconds(4 * FLOATS, WORKERS, link),
            "beside the cost model's",
        )
        for case in rings
    ]
    return found


def _beside(name: str, real: float, predicted: float, what: str) -> Figure:
    """Off by the larger over the smaller, so that one goal holds for both sides."""
    off = max(real / predicted, predicted / real)
    note = (
        f"a step of {WORKERS} workers, {4 * FLOATS / 2**20:g} MiB of parameters, "
        f"{STEP_SECONDS:g} s of sleep for a gradient; {what}; the ratio is the larger over the "
        "smaller"
    )
    return Figure(name, real, predicted, GOAL, "s", note, paired_ratio=off)


def measured(hosts: Lab, cases: Sequence[Case], seconds: float) -> dict[str, list[float]]:
    """When each update was made, by case.

    Raises:
      RunError: this machine cannot hold the lab, or a host fails.
    """
    task = Task(hosts.size, tuple(cases), FLOATS, seconds)
    command = [sys.executable, "-m", "jaxdist.bench.param_server.host", json.dumps(asdict(task))]
    environ = one_device(os.environ)
    printed = lab.run(hosts, command, environ=environ, timeout_seconds=TIMEOUT_SECONDS)
    (line,) = (line for line in printed.splitlines() if line.startswith(FOUND))
    return json.loads(line.removeprefix(FOUND))


def step_seconds(times: Sequence[float], updates: int) -> float:
    """Of one gradient of each worker, from the times of updates, the first steps left out."""
    counted = np.asarray(times[WARMUP * updates :])
    return float((counted[-1] - counted[0]) / (len(counted) - 1) * updates)


def cluster_of(case: Case, link: Link, seconds: float) -> Cluster:
    """A case as the simulator takes it."""
    script = SimulationConfig(step_seconds=case.step_seconds, link=link, seconds=seconds)
    return case.cluster().model_copy(update={"simulation": script})


def simulated(case: Case, link: LabLink, seconds: float) -> float:
    """Seconds of a step in the simulator, on such links."""
    rate = link.payload_bytes_per_s
    cards = Link(
        bytes_per_second=rate, server_bytes_per_second=rate, latency_seconds=MESSAGE_SECONDS
    )
    cluster = cluster_of(case, cards, seconds)
    report = simulate(
        cluster, Nothing(FLOATS), Sgd(0.1), clocks=10**6, measure_every=1, pooled=cluster.pooled
    )
    per_step = cluster.updates_per_step
    points = [point for point in report.curve if point.updates >= WARMUP * per_step]
    first, last = points[0], points[-1]
    return (last.seconds - first.seconds) / (last.updates - first.updates) * per_step


def all_reduce_seconds(size_bytes: int, workers: int, link: LabLink) -> float:
    """By the cost model, on such links."""
    level = Level(workers, hardware.Link(MESSAGE_SECONDS, link.payload_bytes_per_s))
    return predict_seconds(XLA, "all_reduce", size_bytes, [level])
