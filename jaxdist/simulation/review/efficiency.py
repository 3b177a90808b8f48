"""The efficiency of each architecture for several numbers of devices, by simulation or formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.contract import Operation
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.one_f_one_b import OneFOneB
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.runtime.hardware import Link
from jaxdist.simulation.choice import MODELS, Speeds, server_seconds
from jaxdist.simulation.review.settings import Architecture, ReviewConfig

MOST_WORKERS = 16
"""The largest number of workers that are simulated, since the cost of a simulation grows with the
square of this number. For more workers, `busiest_card_seconds` computes the time.
`tests/simulation/test_review.py` compares the simulated and the computed times."""
_CALLS: dict[Architecture, tuple[Operation, ...]] = {
    "ring": ("all_reduce",),
    "ZeRO 1": ("reduce_scatter", "all_gather"),
    # Parameters are gathered for the forward pass, and again for the backward pass.
    "ZeRO 3": ("all_gather", "all_gather", "reduce_scatter"),
}


@dataclass(frozen=True)
class Point:
    """A point of a curve that shows efficiency against the number of devices.

    Attributes:
      seconds: the time of a step, in seconds.
      efficiency: the ratio of the time of a device's work to the time of a step.
    """

    architecture: Architecture
    devices: int
    seconds: float
    efficiency: float


def curves(config: ReviewConfig) -> Iterator[Point]:
    """Yield the points of all curves, architecture by architecture.

    Each device has the same amount of work for every number of devices (weak scaling). No
    communication overlaps with this work, except that a pipeline's messages travel while its stages
    work. A pipeline has at most one stage for each layer.
    """
    for devices in config.devices:
        yield _point(config, "parameter server", devices, _servers(config, devices))
    for architecture in _CALLS:
        for devices in config.devices:
            yield _point(config, architecture, devices, _reduced(config, architecture, devices))
    for devices in config.devices:
        if devices <= config.layers:
            yield _point(config, "pipeline", devices, _piped(config, devices))


def _point(config: ReviewConfig, name: Architecture, devices: int, seconds: float) -> Point:
    return Point(name, devices, seconds, config.step_seconds / seconds)


def _servers(config: ReviewConfig, workers: int) -> float:
    """Return the seconds of a step with parameter servers, if all workers wait for one another."""
    if not 2 <= workers <= MOST_WORKERS:
        return busiest_card_seconds(config, workers)
    equal = Speeds("equal")
    return server_seconds(config.choice(workers), 1.0, config.gbits, equal, MODELS["bsp"])


def busiest_card_seconds(config: ReviewConfig, workers: int) -> float:
    """Return the time of a step, if all messages pass the busiest network card one after another.

    The network card of a server carries the server's share of the parameters once for each worker.
    The network card of a worker carries all parameters.
    """
    link = _link(config)
    carried = config.parameter_bytes * max(1.0, workers / config.servers)
    return config.step_seconds + 2 * (link.latency_seconds + carried / link.bytes_per_second)


def _reduced(config: ReviewConfig, architecture: Architecture, devices: int) -> float:
    """Return the time of a step with the architecture's collectives, each by a ring."""
    levels = [Level(devices, _link(config))]
    calls = _CALLS[architecture]
    spent = sum(predict_seconds(Ring(), call, config.parameter_bytes, levels) for call in calls)
    return config.step_seconds + spent


def _piped(config: ReviewConfig, stages: int) -> float:
    """Return the time of a step of 1F1B, with backward tasks twice as long as forward tasks."""
    forward = config.step_seconds / (3 * config.microbatches)
    link = _link(config)
    message = link.latency_seconds + config.message_bytes / link.bytes_per_second
    costs = Costs(forward, forward, forward, transfer=message)
    schedule = OneFOneB(type="1f1b").build(stages, config.microbatches)
    return simulate(schedule, costs).makespan


def _link(config: ReviewConfig) -> Link:
    return Link(config.latency_seconds, config.gbits * 1e9 / 8)
