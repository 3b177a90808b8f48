"""A server's role in a range, as follower and then as leader, and the orders to the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.shard import ServerShard
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.replication.decision import Leader, RangeView
from jaxdist.replication.links import CopyService
from jaxdist.replication.server import ReplicatedServer
from jaxdist.types import JsonObject
from jaxdist.wire.contract import Service, Wire
from jaxdist.wire.ports import Place


class Seat:
    """A range on a server: a `CopyService`, and a `ReplicatedServer` once this server leads.

    Args:
      number: the number of the server.
      start: the state of the protocol if the server leads from the beginning, or None if the server
        joins later.
      opens: a function that opens a port for a service, keeps the port open, and returns the
        address of the port (`jaxdist.wire.ports.Place`).
      wire_to: a function from the address at which another server copies ranges, to a wire to that
        server.
      say: a function that sends a report to the arbiter. A report gives the address at which this
        server copies the range, or says that this server leads now or that another may follow now.
      kind: the class of the server that leads.
    """

    def __init__(
        self,
        number: int,
        shard: ServerShard,
        model: Consistency,
        start: RangeState | None,
        *,
        opens: Callable[[Service], Place],
        wire_to: Callable[[Place], Wire],
        say: Callable[[JsonObject], None],
        kind: type[ReplicatedServer] = ReplicatedServer,
    ) -> None:
        self.number, self.model, self.range = number, model, shard.layout.server
        self._opens, self._wire_to, self._say = opens, wire_to, say
        self._kind = kind
        self._admitted: list[int] = []
        self.copies = CopyService(number, shard)
        self.server: ReplicatedServer | None = None
        if start is not None:
            self._lead(Leader(RangeView(0, 0, number), start))
        else:
            port = opens(self.copies)
            say({"event": "copies", "range": self.range, "server": number, "port": port})

    def view(self, view: RangeView, ports: Mapping[int, Place]) -> None:
        """Carry out a decision of the arbiter: begin to lead, or copy the range to other servers.

        Args:
          ports: the address at which each other server of the view copies the range, by server.
        """
        if self.server is not None:
            wires = {server: self._wire_to(port) for server, port in ports.items()}
            self.server.viewed(view, wires)
        elif view.leader == self.number:
            self._lead(self.copies.takes_over(view))

    def admit(self, client: int) -> None:
        """Allow a new client to join, even if this server becomes the leader only later."""
        self._admitted.append(client)
        if self.server is not None:
            self.server.admit(client)

    def close(self) -> None:
        """Stop the server of the range if this seat leads the range."""
        if self.server is not None:
            self.server.close()

    def _lead(self, leader: Leader) -> None:
        def synced(server: int, number: int) -> None:
            self._say({"event": "synced", "range": self.range, "server": server, "number": number})

        self.server = self._kind(self.number, self.copies.shard, self.model, leader, synced)
        for client in self._admitted:
            self.server.admit(client)
        port, epoch = self._opens(self.server), leader.view.epoch
        told = {"event": "leads", "range": self.range, "server": self.number}
        self._say({**told, "port": port, "epoch": epoch})


class Arbiter:
    """The arbiter of one range, which decides on its servers and sends orders to its leader.

    Args:
      tell: a function that sends an order to a server.

    Attributes:
      view: the current decision, or None if no remaining server has all that was acknowledged.
      port: the address of the leader (`jaxdist.wire.ports.Place`), or None while a server takes
        over.
    """

    def __init__(self, range: int, leader: int, tell: Callable[[int, JsonObject], None]) -> None:
        self.range, self._tell = range, tell
        self.view: RangeView | None = RangeView(0, 0, leader)
        self.port: Place | None = None
        self._copies: dict[int, Place] = {}

    @property
    def safe(self) -> bool:
        """Whether the range has a leader that answers, and a complete follower."""
        view = self.view
        return view is not None and self.port is not None and view.follower is not None

    def knows(self, server: int) -> bool:
        """Return whether a server leads the range, has a copy of the range, or waits for a copy."""
        view = self.view
        return server in self._copies or (view is not None and server == view.leader)

    def hear(self, what: JsonObject) -> None:
        """Process the report of a server about this range."""
        if self.view is None:
            return
        server = what["server"]
        match what["event"]:
            case "leads" if what["epoch"] == self.view.epoch:
                self.port = what["port"]
            case "copies":
                self._copies[server] = what["port"]
                self._decide(self.view.joined_by(server))
            case "synced":
                self._decide(self.view.synced(server, what["number"]))

    def failed(self, server: int) -> None:
        """Process the end of a server's process, or of the server's part in the range."""
        self._copies.pop(server, None)
        if self.view is None:
            return
        found = self.view.failed(server, self.view.number)
        if found is None or found.epoch > self.view.epoch:
            self.port = None
        self._decide(found)
        # The view may now need a server that already has a copy, or that waits for a copy.
        for other in self._copies:
            if self.view is not None:
                self._decide(self.view.joined_by(other))

    def _decide(self, view: RangeView | None) -> None:
        before, self.view = self.view, view
        if view is None or view is before:
            return
        ports = {one: self._copies[one] for one in (view.follower, view.joining) if one is not None}
        order = [*astuple(view)]
        self._tell(view.leader, {"range": self.range, "view": order, "ports": [*ports.items()]})
