"""The result of a simulation, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdist.types import JsonObject


class Point(NamedTuple):
    """The loss at a point in time.

    Attributes:
      gradients: the number of gradients that all workers have computed.
      steps: the gradients divided by the number of workers.
      updates: the number of updates of server 0.
    """

    seconds: float
    gradients: int
    steps: float
    updates: int
    loss: float


class WorkerReport(NamedTuple):
    """The work and the idle time of a worker."""

    gradients: int
    busy_seconds: float
    idle_seconds: float
    crashes: int

    @property
    def idle_share(self) -> float:
        """The share of the worker's lifetime that was spent waiting."""
        return self.idle_seconds / max(self.busy_seconds + self.idle_seconds, 1e-300)


@dataclass(frozen=True)
class Report:
    """The result of a simulation.

    Attributes:
      params: the final parameters.
      seconds: the virtual time at the end, in seconds.
      curve: the loss over time.
      work: the work of each worker.
      staleness: the number of changes for each staleness, in updates, over all servers.
      updates_per_step: the number of updates of a range in a step of all workers.
      dropped: the number of changes that were not applied, by reason.
      received_bytes: the bytes that each server received, copies included.
      sent_bytes: the bytes that each server sent, lost messages included.
      rack_received_bytes: the bytes that each rack's aggregator received from workers and servers,
        or an empty tuple without racks.
      lost: the number of lost messages.
      reads: the number of reads that were checked against the model's bound.
      largest_lead: the age of the oldest checked read, in clocks.
      bound: the largest allowed age of a read, in clocks, or None if the model has no bound.
      largest_value: the largest change of a parameter that was under way, or 0 without a value
        bound.
    """

    params: Mapping[str, np.ndarray]
    seconds: float
    curve: tuple[Point, ...]
    work: tuple[WorkerReport, ...]
    staleness: Counter[int]
    updates_per_step: int
    dropped: Counter[str]
    received_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    rack_received_bytes: tuple[int, ...]
    lost: int
    reads: int
    largest_lead: int
    bound: int | None
    largest_value: float

    @property
    def loss(self) -> float:
        """The last measured loss."""
        return self.curve[-1].loss

    @property
    def mean_staleness(self) -> float:
        """The mean staleness in updates, or 0 if no change was applied."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(total, 1)

    @property
    def idle_share(self) -> float:
        """The share of all workers' lifetimes that was spent waiting."""
        idle = sum(one.idle_seconds for one in self.work)
        return idle / max(idle + sum(one.busy_seconds for one in self.work), 1e-300)

    def seconds_to(self, loss: float) -> float | None:
        """Return the virtual time of the first loss of at most `loss`, or None if there is none."""
        return next((point.seconds for point in self.curve if point.loss <= loss), None)

    def as_json(self) -> JsonObject:
        """Return all values except the parameters for JSON; a loss that is not finite is null."""
        return {
            "seconds": self.seconds,
            "curve": [
                {**point._asdict(), "loss": point.loss if np.isfinite(point.loss) else None}
                for point in self.curve
            ],
            "workers": [{**one._asdict(), "idle_share": one.idle_share} for one in self.work],
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "updates_per_step": self.updates_per_step,
            "dropped": dict(self.dropped),
            "received_bytes": list(self.received_bytes),
            "sent_bytes": list(self.sent_bytes),
            "rack_received_bytes": list(self.rack_received_bytes),
            "lost_messages": self.lost,
            "checked_reads": self.reads,
            "largest_lead": self.largest_lead,
            "bound": self.bound,
            "largest_value": self.largest_value,
        }
