"""The checks of a simulation: the age of reads, and the size of changes not yet applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import OnArrival
from jaxdist.simulation.engine.setup import bound_of
from jaxdist.simulation.engine.shard import ShardNode


class Reads:
    """A check of the age of reads, by a separate count of the changes in each version.

    Attributes:
      bound: the largest allowed age of a read, in clocks, or None if the model has no bound.
      count: the number of reads that were checked.
      largest_lead: the largest age of a read so far, in clocks.
    """

    def __init__(self, cluster: Cluster, shards: Sequence[ShardNode]) -> None:
        self.bound, self._shards = bound_of(cluster.consistency), shards
        self.count, self.largest_lead = 0, 0

    def check(self, server: int, clock: int, version: int) -> None:
        """Assert that a client will read a version as new as the consistency model requires."""
        lead = clock - self._shards[server].floors[version]
        self.count += 1
        self.largest_lead = max(self.largest_lead, lead)
        assert self.bound is None or lead <= self.bound, (
            f"a client at clock {clock} reads version {version} of server {server}, {lead} clocks "
            f"old: more than {self.bound}"
        )


class Values:
    """A record of the quantity that a value bound limits: the sum of a worker's unapplied changes.

    Attributes:
      largest: the largest change that plain SGD would make to a parameter with any of the sums so
        far.
    """

    def __init__(self, cluster: Cluster, learning_rate: float) -> None:
        self.model, self.largest = cluster.consistency, 0.0
        self._workers, self._learning_rate = cluster.workers, learning_rate

    @property
    def watched(self) -> bool:
        """Whether the consistency model has a `value_bound` on a worker's unapplied changes."""
        return isinstance(self.model, OnArrival) and self.model.value_bound is not None

    def of(self, change: np.ndarray) -> float:
        """Return the largest change of a parameter that plain SGD would make with these gradients.

        The result is NaN if any gradient contains a NaN.
        """
        assert isinstance(self.model, OnArrival)
        unit = self._learning_rate * self.model.rate(0, self._workers)
        return unit * float(np.abs(change).max(initial=0.0))

    def look(self, under_way: Sequence[np.ndarray]) -> None:
        """Update `largest` from each worker's changes that are sent to a server but not applied.

        A sum with a NaN or an infinity is not counted, because the server will drop the change with
        this value.
        """
        found = self.of(np.sum(under_way, axis=0))
        if np.isfinite(found):
            self.largest = max(self.largest, found)
