"""The progress of processes on other hosts, from which a host finds a stuck process.

The clocks of hosts differ, so a host publishes the ages of its statuses instead of their times. The
ages are part of the message that the host sends twice a second to renew its lease. Another host
reads the message only if its own processes have waited too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.heartbeat.status import Status
from jaxdist.metrics.account import Activity
from jaxdist.types import JsonObject

READ_SECONDS = 1.0
"""The time between two reads of the messages of other hosts, in seconds."""


def encode_progress(generation: int, statuses: Sequence[Status], now: float) -> JsonObject:
    """Return the progress of a host's processes as JSON.

    Args:
      now: the current time in seconds, by the clock that gave the times of the statuses.
    """
    told = [
        [one.process, one.step, str(one.phase), one.waiting, now - one.since, now - one.alive]
        for one in statuses
    ]
    return {"generation": generation, "processes": told}


class RemoteProgress:
    """The progress of the processes on other hosts in one generation.

    Attributes:
      statuses: the statuses of all processes on other hosts, with times by this host's clock, or
        None while the status of a process is unknown.
    """

    def __init__(self, own: str, generation: int, processes: int) -> None:
        self.own, self.generation, self.processes = own, generation, processes
        self._heard: dict[str, tuple[int, float]] = {}
        self._next = float("-inf")
        self.statuses: list[Status] | None = None

    def due(self, now: float) -> bool:
        """Return whether it is time to read the messages of other hosts."""
        return now >= self._next

    def read(self, said: Mapping[str, Any], now: float) -> None:
        """Store the last messages of all hosts.

        Args:
          said: each host's last message, as `jaxdist.elastic.hosts.leader_election.encode_renewal`
            has written it.
          now: the current time in seconds. The age of a message counts from the time at which this
            host first read the message, so a status may appear younger than it is, but never older.
        """
        self._next = now + READ_SECONDS
        found: list[Status] = []
        for host, message in said.items():
            told = message["facts"].get("progress")
            if host == self.own or told is None or told["generation"] != self.generation:
                continue
            if self._heard.get(host, (None, now))[0] != message["number"]:
                self._heard[host] = message["number"], now
            at = self._heard[host][1]
            for process, step, phase, waiting, since, alive in told["processes"]:
                kind = Activity(phase)
                found.append(Status(process, 0, step, kind, at - since, at - alive, waiting))
        self.statuses = found if len(found) == self.processes else None
