"""What a simulation has found, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdist.types import JsonObject


class Point(NamedTuple):
    """The loss at a time, after so many gradients of all workers and updates of server 0."""

    seconds: float
    gradients: int
    updates: int
    loss: float


class Work(NamedTuple):
    """What a worker did."""

    gradients: int
    busy_seconds: float
    idle_seconds: float
    crashes: int

    @property
    def idle_share(self) -> float:
        """Of the time that it lived, what it waited."""
        return self.idle_seconds / max(self.busy_seconds + self.idle_seconds, 1e-300)


@dataclass(frozen=True)
class Report:
    """What a simulation has found.

    Attributes:
      params: at the end.
      seconds: virtual time of the end.
      curve: the loss over time.
      work: by worker.
      staleness: how many changes had so much, in updates, over all servers.
      dropped: changes that were not applied, by reason.
      received_bytes: by server, copies included.
      sent_bytes: by server, losses included.
      lost: messages.
      reads: how many were checked for the model's bound.
      largest_lead: the oldest of them, in clocks.
      largest_value: of the sum of all changes under way, under a value bound.
    """

    params: Mapping[str, np.ndarray]
    seconds: float
    curve: tuple[Point, ...]
    work: tuple[Work, ...]
    staleness: Counter[int]
    dropped: Counter[str]
    received_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    lost: int
    reads: int
    largest_lead: int
    largest_value: float

    @property
    def mean_staleness(self) -> float:
        """In updates; 0 where nothing was applied."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(total, 1)

    def seconds_to(self, loss: float) -> float | None:
        """The first time that a measured loss is no more than this; None: never."""
        return next((point.seconds for point in self.curve if point.loss <= loss), None)

    def as_json(self) -> JsonObject:
        """All but the parameters, for a JSON file."""
        return {
            "seconds": self.seconds,
            "curve": [point._asdict() for point in self.curve],
            "workers": [{**one._asdict(), "idle_share": one.idle_share} for one in self.work],
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "dropped": dict(self.dropped),
            "received_bytes": list(self.received_bytes),
            "sent_bytes": list(self.sent_bytes),
            "lost_messages": self.lost,
            "checked_reads": self.reads,
            "largest_lead": self.largest_lead,
            "largest_value": self.largest_value,
        }

    def table(self) -> str:
        """Workers, servers and staleness, for people."""
        lines = [f"{'worker':>6}  {'gradients':>9}  {'busy s':>8}  {'idle s':>8}  idle"]
        for number, one in enumerate(self.work):
            lines.append(
                f"{number:>6}  {one.gradients:>9}  {one.busy_seconds:>8.3g}  "
                f"{one.idle_seconds:>8.3g}  {one.idle_share:.0%}"
            )
        lines.append(f"{'server':>6}  {'MB in':>9}  {'MB out':>8}")
        for number, pair in enumerate(zip(self.received_bytes, self.sent_bytes, strict=True)):
            lines.append(f"{number:>6}  {pair[0] / 1e6:>9.4g}  {pair[1] / 1e6:>8.4g}")
        total = max(sum(self.staleness.values()), 1)
        shares = (f"{age}: {self.staleness[age] / total:.0%}" for age in sorted(self.staleness))
        lines.append(f"staleness in updates: {', '.join(shares)}")
        last = self.curve[-1]
        lines.append(
            f"loss {last.loss:.4g} after {last.gradients} gradients, {self.seconds:.4g} s; reads "
            f"{self.reads}, at most {self.largest_lead} clocks old"
        )
        return "\n".join(lines)
