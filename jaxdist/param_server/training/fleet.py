"""The processes to which workers push: servers, and the aggregators in front of servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jaxdist.param_server.cluster import Cluster
from jaxdist.runtime.children import Event, end_together
from jaxdist.types import JsonObject
from jaxdist.wire.children import Role, RunProcess
from jaxdist.wire.ports import Place


class Starts(Protocol):
    """A function that starts a process and sends the process its setup."""

    def __call__(self, role: Role, number: int, /, **setup: object) -> RunProcess: ...


class EssentialProcesses:
    """The servers and aggregators of a run; the run ends if any of these processes ends.

    Args:
      start: the function that starts a process.
      next_event: the function that returns the next message of a process; its argument names the
        event for which the caller waits.
    """

    def __init__(self, cluster: Cluster, start: Starts, next_event: Callable[[str], Event]) -> None:
        self.cluster, self._start, self._next = cluster, start, next_event
        self.servers: list[RunProcess] = []
        self.aggregators: list[RunProcess] = []
        self._ports: dict[RunProcess, list[Place]] = {}

    def begin(self, due: list[int]) -> None:
        """Start all processes, and wait until all of them listen.

        Args:
          due: the clocks at which the servers save their state.
        """
        clients, racks = range(self.cluster.clients), len(self.cluster.racks)
        # If all workers have left a rack, the rack returns with its next number. Servers admit this
        # number in advance.
        given = {"clients": [*clients], "admitted": [rack + racks for rack in range(racks)]}
        for number in range(self.cluster.servers):
            self.servers.append(self._start("server", number, due=due, **given))
        self._listen(self.servers, "servers to start")
        ports = self._ports_of(self.servers)
        for rack in range(racks):
            self.aggregators.append(self._start("aggregator", rack, ports=ports))
        self._listen(self.aggregators, "aggregators to start")

    def _listen(self, children: list[RunProcess], what: str) -> None:
        while not all(child in self._ports for child in children):
            event = self._next(what)
            if event.what.get("event") == "listening":
                self._ports[event.child] = event.what["ports"]

    def _ports_of(self, children: list[RunProcess]) -> list[Place]:
        return [port for child in children for port in self._ports[child]]

    def _in_front(self, slot: int) -> list[RunProcess]:
        """Return the processes to which a worker pushes."""
        rack = self.cluster.rack_of(slot)
        return self.servers if rack is None else [self.aggregators[rack]]

    def ports(self, slot: int) -> list[Place]:
        """Return the ports to which a worker pushes, one for each server."""
        return self._ports_of(self._in_front(slot))

    def tell(self, slot: int, order: JsonObject) -> None:
        """Send an order about a worker to the processes to which the worker pushes."""
        for child in self._in_front(slot):
            child.say(order)

    def gone(self, what: JsonObject) -> None:
        """Report to a server that a rack without workers has left, and admit a later client number.

        The rack continues with its next client number, which the server has admitted already. The
        server now admits the rack's client number after the next.

        Args:
          what: the aggregator's message, with the number of the server, and the client number that
            the rack had at this server.
        """
        server, client = self.servers[what["server"]], what["client"]
        server.say({"leave": client})
        # A rack's client numbers differ by the number of racks.
        server.say({"admit": client + 2 * len(self.cluster.racks)})

    def end(self) -> None:
        """Terminate the processes that are still alive."""
        end_together([*self.aggregators, *self.servers])
