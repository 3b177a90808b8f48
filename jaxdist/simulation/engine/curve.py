"""The loss of the servers' parameters, measured every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.live.layout import joined_shards
from jaxdist.simulation.engine.problem import TrainingProblem
from jaxdist.simulation.engine.report import Point
from jaxdist.simulation.engine.shard import ShardNode


def joined_parameters(
    problem: TrainingProblem, nodes: Sequence[ShardNode], shards: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Join the ranges of all servers to whole parameters, by name."""
    shapes = {name: np.shape(array) for name, array in problem.start.items()}
    return joined_shards([node.layout for node in nodes], shards, shapes)


class LossCurve:
    """A loss curve over virtual time.

    Args:
      every: the number of steps between two points; a step is as many gradients as there are
        workers.
      gradients: the function that returns the number of gradients that all workers have computed.
    """

    def __init__(
        self,
        cluster: Cluster,
        problem: TrainingProblem,
        nodes: Sequence[ShardNode],
        every: int,
        gradients: Callable[[], int],
    ) -> None:
        self.cluster, self.problem, self.nodes = cluster, problem, nodes
        self.points: list[Point] = []
        self._every, self._next, self._gradients = every, float(every), gradients

    def look(self, now: float) -> None:
        """Add a point if the next multiple of `every` steps has been reached."""
        steps = self.nodes[0].merged * self.cluster.local_steps / self.cluster.clients
        if steps >= self._next:
            self._next = (steps // self._every + 1) * self._every
            self.measure(now)

    def measure(self, now: float) -> None:
        """Add a point at this time if the number of updates or the loss has changed."""
        params = joined_parameters(
            self.problem, self.nodes, [node.arrays.params for node in self.nodes]
        )
        gradients = self._gradients()
        steps = gradients / self.cluster.workers
        updates = self.nodes[0].state.clocks.version
        point = Point(now, gradients, steps, updates, self.problem.loss(params))
        if not self.points or self.points[-1][3:] != point[3:]:
            self.points.append(point)
