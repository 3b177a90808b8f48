"""Parameter servers on slow links in real time, compared with the simulator's predictions.

Each host has one process: a server, or one of three workers that sleep instead of computing. Two
all-reduces of the same workers are compared with the cost model, as the alternative to a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.collectives.lab import MESSAGE_SECONDS
from benchmarks.core import lab
from benchmarks.core.hosts import on_hosts
from benchmarks.core.lab import Lab, LabLink
from benchmarks.core.report import Figure, apart
from benchmarks.param_server import host
from benchmarks.param_server.host import RING, Case, Task
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.param_server.scenario import NetworkConfig, SimulationConfig
from jaxdist.runtime import hardware
from jaxdist.simulation.engine.pace import WARMUP
from jaxdist.simulation.engine.pace import step_seconds as simulated_step_seconds

FLOATS = 2**18
WORKERS = 3
STEP_SECONDS, SLOWER = 0.1, 2.0
TOUCHED = 0.01
"""The fraction of the parameters that a batch of a sparse model touches."""
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


def figures() -> list[Figure]:
    """Compare real step times with the simulator, and real all-reduces with the cost model.

    Raises:
      RunError: a host fails.
    """
    reason = lab.unavailable(Lab(sites=1 + WORKERS))
    if reason:
        return [Figure.skipped("slow-link lab", reason)]
    return [figure for link in LINKS for figure in _on(link)]


def _on(link: LabLink) -> list[Figure]:
    cases = [
        Case(f"{name}, {speeds}", model, steps)
        for speeds, steps in SPEEDS.items()
        for name, model in MODELS_SHOWN.items()
    ]
    found = _against_simulator(cases, link, FLOATS)
    sparse = [
        Case(f"bsp, 1% touched, {name}", {"type": "bsp"}, own) for name, own in SPEEDS.items()
    ]
    found += _against_simulator(sparse, link, int(TOUCHED * FLOATS))
    rings = [Case(f"all-reduce, {name}", {"type": RING}, steps) for name, steps in SPEEDS.items()]
    summed = measured(Lab(sites=WORKERS, across=link), rings, RUN_SECONDS[link.bits_per_s])
    found += [
        _beside(
            f"{case.name}, {_named(link)}",
            step_seconds(summed[case.name], 1),
            max(case.step_seconds) + all_reduce_seconds(4 * FLOATS, WORKERS, link),
            f"{4 * FLOATS:,} bytes; beside the cost model's",
        )
        for case in rings
    ]
    return found


def _named(link: LabLink) -> str:
    return f"{link.bits_per_s / 1e6:g} Mbit/s"


def _against_simulator(cases: Sequence[Case], link: LabLink, floats: int) -> list[Figure]:
    seconds = RUN_SECONDS[link.bits_per_s]
    real = measured(Lab(sites=1 + WORKERS, across=link), cases, seconds, floats)
    return [
        _beside(
            f"{case.name}, {_named(link)}",
            step_seconds(real[case.name], case.cluster().updates_per_step),
            simulated(case, link, seconds, floats),
            f"{4 * floats:,} bytes; beside the simulator's",
        )
        for case in cases
    ]


def _beside(name: str, real: float, predicted: float, what: str) -> Figure:
    """Return a figure whose ratio is the larger time divided by the smaller time."""
    note = (
        f"a step of {WORKERS} workers, {STEP_SECONDS:g} s of sleep for a gradient, {what}; the "
        "ratio is the larger over the smaller"
    )
    return Figure(name, real, predicted, GOAL, "s", note, paired_ratio=apart(real, predicted))


def measured(
    hosts: Lab, cases: Sequence[Case], seconds: float, floats: int = FLOATS
) -> dict[str, list[float]]:
    """Run the cases in the lab, and return the times of their updates by case.

    Raises:
      RunError: this machine cannot hold the lab, or a host fails.
    """
    task = Task(hosts.size, tuple(cases), floats, seconds)
    return {one.case: list(one.times) for one in on_hosts(hosts, host.play, task)}


def step_seconds(times: Sequence[float], updates: int) -> float:
    """Return the mean seconds in which each worker computes a gradient, without the first steps."""
    counted = np.asarray(times[WARMUP * updates :])
    return float((counted[-1] - counted[0]) / (len(counted) - 1) * updates)


def simulated(case: Case, link: LabLink, seconds: float, floats: int = FLOATS) -> float:
    """Return the seconds of a step in the simulator, with links of this kind."""
    rate = link.payload_bytes_per_s
    cards = NetworkConfig(
        bytes_per_second=rate, server_bytes_per_second=rate, latency_seconds=MESSAGE_SECONDS
    )
    script = SimulationConfig(step_seconds=case.step_seconds, link=cards)
    cluster = case.cluster().model_copy(update={"simulation": script})
    return simulated_step_seconds(cluster, floats, seconds)


def all_reduce_seconds(size_bytes: int, workers: int, link: LabLink) -> float:
    """Return the seconds of an all-reduce by the cost model, with links of this kind."""
    level = Level(workers, hardware.Link(MESSAGE_SECONDS, link.payload_bytes_per_s))
    return predict_seconds(XLA, "all_reduce", size_bytes, [level])
