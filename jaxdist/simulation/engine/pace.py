"""The time of a step, measured in a simulation whose gradients are zeros."""

from __future__ import annotations

import math

import numpy as np

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.contract import Arrays
from jaxdist.simulation.engine.problem import Computed, Sgd
from jaxdist.simulation.engine.run import simulate_training

WARMUP = 4
"""The number of first steps that the mean leaves out."""


class Still:
    """A problem whose gradients are zeros, with parameters in several arrays of equal length."""

    def __init__(self, floats: int, arrays: int) -> None:
        each = np.zeros(-(-floats // arrays), np.float32)
        self.start: Arrays = {f"w{number}": each for number in range(arrays)}

    def gradient(self, params: Arrays, worker: int, step: int) -> Computed:
        return Computed(self.start)

    def loss(self, params: Arrays) -> float:
        return 0.0


def step_seconds(cluster: Cluster, floats: int, seconds: float) -> float:
    """Return the mean virtual seconds from a step of all workers to the next.

    Args:
      cluster: the cluster, whose section `simulation` has the speeds and the links.
      floats: the number of float32 parameters.
      seconds: the virtual seconds that are simulated.

    Returns:
      The mean, or NaN if the loss curve has fewer than two points after the warm-up.
    """
    script = cluster.simulation.model_copy(update={"seconds": seconds})
    report = simulate_training(
        cluster.model_copy(update={"simulation": script}),
        Still(floats, cluster.servers),
        Sgd(0.1),
        clocks=10**6,  # The time limit ends the run before any worker has this number of clocks.
        measure_every=1,
        pooled=cluster.pooled,
    )
    per_step = cluster.updates_per_step
    points = [point for point in report.curve if point.updates >= WARMUP * per_step]
    if len(points) < 2:
        return math.nan
    first, last = points[0], points[-1]
    return (last.seconds - first.seconds) / (last.updates - first.updates) * per_step
