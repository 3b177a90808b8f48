"""The supervisor's record of a run: reports of workers and servers, collected by clock."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from jaxdist.param_server.cluster import Cluster
from jaxdist.types import JsonObject

Rate = Callable[[int], float]
Sums = Mapping[str, Sequence[float]]
"""The total and weight of each value that the loss measures, by name."""


class ClockReports:
    """A collection of the reports of workers and servers, by clock.

    Args:
      names: the names of the values in a step's metrics.
      rate: the function from a step to the learning rate.
      first: the first clock of the run.

    Attributes:
      empty: the number of clocks in which all examples of all workers had no weight, so that
        servers took no step.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str], rate: Rate, first: int) -> None:
        self.cluster, self.names, self.rate, self.first = cluster, names, rate, first
        self.progress: dict[int, int] = dict.fromkeys(range(cluster.workers), first - 1)
        self.computed: dict[int, int] = dict(self.progress)
        self._sums: dict[int, dict[int, Sums]] = defaultdict(dict)
        self._last_sums: dict[int, Sums] = {}
        self._means: dict[str, float] = {}
        self.empty = 0
        self._squares: dict[int, dict[int, float]] = defaultdict(dict)
        self._known: dict[int, float] = {}
        self._floors: dict[int, int] = dict.fromkeys(range(cluster.servers), first)
        self._stats: dict[int, JsonObject] = {}
        self._aggregators: dict[int, JsonObject] = {}
        self._workers: dict[int, JsonObject] = {}
        self._busy: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._last = time.monotonic()

    @property
    def newest(self) -> int:
        """The newest clock that any worker has computed."""
        return max(self.computed.values())

    @property
    def clock_seconds(self) -> float:
        """The seconds of the fastest worker's last clock, or 1 before the first clock."""
        return min((report["seconds"] for report in self._workers.values()), default=1.0)

    @property
    def longest_seconds(self) -> float:
        """The seconds of the slowest worker's last clock, or 0 before the first clock."""
        return max((report["seconds"] for report in self._workers.values()), default=0.0)

    def behind(self, slots: set[int]) -> set[int]:
        """Return the slots whose workers have computed the fewest clocks.

        The workers of other slots may wait for these workers.
        """
        least = min((self.computed[slot] for slot in slots), default=0)
        return {slot for slot in slots if self.computed[slot] == least}

    def measured(self, slot: int, clock: int, sums: Sums) -> None:
        """Record that a worker has computed a clock and is about to push."""
        self.computed[slot] = max(self.computed[slot], clock)
        self._sums[clock][slot] = sums

    def clock(self, slot: int, report: JsonObject) -> None:
        """Record that a worker has finished a clock and can start the next clock."""
        self.progress[slot] = max(self.progress[slot], report["clock"])
        self._workers[slot] = report
        spent = self._busy[slot]
        spent[0] += report["seconds"]
        spent[1] += report["waited_seconds"]

    def applied(self, server: int, report: JsonObject) -> None:
        """Record a server's report: floor, counters, and the squared norm of each update."""
        self._squares[server] |= {int(version): square for version, square in report["squares"]}
        self._stats[server] = report["stats"]
        self._floors[server] = report["stats"]["floor"]

    def forwarded(self, aggregator: int, stats: JsonObject) -> None:
        """Record the counters of an aggregator."""
        self._aggregators[aggregator] = stats

    def complete(self, clock: int, done: set[int]) -> bool:
        """Return whether all active workers and all servers have passed a clock."""
        if any(floor <= clock for floor in self._floors.values()):
            return False
        return all(at >= clock for slot, at in self.progress.items() if slot not in done)

    def metrics(self, clock: int, step: int) -> tuple[list[float], float]:
        """Return the values of a step, in the order of `names`, and its duration in seconds.

        The loss of the previous clock is returned in two cases: if no worker's examples had any
        weight, or if all workers died after their push and before their loss. The second case is
        possible in elastic averaging, where a worker pushes first.
        """
        self._last_sums = self._sums.pop(clock, self._last_sums)
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        # A worker's loss that is not finite would spoil the mean over workers.
        finite = [sums for sums in self._last_sums.values() if _is_finite(sums)]
        for sums in finite:
            for name, (total, weight) in sums.items():
                totals[name][0] += total
                totals[name][1] += weight
        self._means |= {name: total / weight for name, (total, weight) in totals.items() if weight}
        if finite and not totals["loss"][1]:
            self.empty += 1
        values = {name: self._means.get(name, 0.0) for name in totals}
        values |= {"grad_norm": self._norm(clock), "learning_rate": self.rate(step - 1)}
        now = time.monotonic()
        took, self._last = now - self._last, now
        return [values.get(name, math.nan) for name in self.names], took

    def _norm(self, clock: int) -> float:
        """Return the norm of a step's updates: the root of the sum of the servers' mean squares."""
        per_step = self.cluster.updates_per_step
        before = clock * per_step
        for server, squares in self._squares.items():
            found = [s for version, s in squares.items() if version <= before + per_step]
            if found:
                self._known[server] = sum(found) / len(found)
            for version in [v for v in squares if v <= before + per_step]:
                del squares[version]
        return math.sqrt(sum(self._known.values()))

    def summary(self) -> dict[str, float]:
        """Return the counters and idle shares of servers, aggregators and workers, by name."""
        found: dict[str, float] = {"empty_steps": self.empty} if self.empty else {}
        for server, stats in sorted(self._stats.items()):
            told = {name: value for name, value in stats.items() if name != "floor"}
            found |= {f"server_{server}_{name}": value for name, value in told.items()}
        for number, stats in sorted(self._aggregators.items()):
            found |= {f"aggregator_{number}_{name}": value for name, value in stats.items()}
        for slot, (seconds, waited) in sorted(self._busy.items()):
            found[f"worker_{slot}_idle_share"] = waited / seconds if seconds else 0.0
            for name in ("received_bytes", "sent_bytes"):
                found[f"worker_{slot}_{name}"] = self._workers[slot][name]
        return found


def _is_finite(sums: Sums) -> bool:
    return all(math.isfinite(number) for pair in sums.values() for number in pair)
