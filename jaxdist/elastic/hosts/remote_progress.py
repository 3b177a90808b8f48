"""How far the processes of other hosts are, as far as these have told: for who waits for them.

Clocks of hosts differ, so that what is told are ages. They go with what a host says anyway, twice a
second; the others are read only where processes have waited for too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.heartbeat.status import Status
from jaxdist.metrics.account import Kind
from jaxdist.types import JsonObject

READ_SECONDS = 1.0
"""Between two looks at what others have told."""


def encode(generation: int, statuses: Sequence[Status], now: float) -> JsonObject:
    """What a host tells of its processes.

    Args:
      now: seconds of the clock that the statuses have.
    """
    told = [
        [one.process, one.step, str(one.phase), one.waiting, now - one.since, now - one.alive]
        for one in statuses
    ]
    return {"generation": generation, "processes": told}


class RemoteProgress:
    """The processes of other hosts in one generation."""

    def __init__(self, own: str, generation: int, processes: int) -> None:
        self.own, self.generation, self.processes = own, generation, processes
        self._heard: dict[str, tuple[int, float]] = {}
        self._next, self._found = float("-inf"), None

    def due(self, now: float) -> bool:
        """Whether to read again what others have said."""
        return now >= self._next

    def read(self, said: Mapping[str, Any], now: float) -> None:
        """Take in what all hosts have said last.

        Args:
          said: by host, as `jaxdist.elastic.hosts.leader_election.encode_renewal` has it.
          now: seconds; since when a message lies there is counted from when it was seen first, so
            that what it tells is rather too young than too old.
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
                kind = Kind(phase)
                found.append(Status(process, 0, step, kind, at - since, at - alive, waiting))
        self._found = found if len(found) == self.processes else None

    @property
    def statuses(self) -> list[Status] | None:
        """Of all processes of other hosts, by this host's clock; None where some are not known."""
        return self._found
