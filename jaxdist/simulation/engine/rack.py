"""A rack's aggregator in a simulation: a client of all servers, and a server of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.contract import Arrival
from jaxdist.param_server.protocol import client, rack
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Answer, Drop, Message, Reply
from jaxdist.param_server.protocol.rack import Ask, Forward, RackState, RackStep
from jaxdist.simulation.engine.client import RetryingClient
from jaxdist.simulation.engine.network import Node

if TYPE_CHECKING:
    from jaxdist.simulation.engine.run import Simulation


class RackNode(RetryingClient):
    """The aggregator of a rack.

    Attributes:
      place: the index of the rack.
      client: the rack's number as a client of the servers. A rack that has lost all of its workers
        gets a new number.
      workers: the numbers of the rack's workers.
      states: the protocol's state for each server, or an empty list while the rack has no workers.
    """

    def __init__(self, place: int, workers: tuple[int, ...], run: Simulation) -> None:
        super().__init__(run)
        self.place, self.workers = place, workers
        self.states = list[RackState]()

    @property
    def node(self) -> Node:
        return "rack", self.place

    def join(self, worker: int) -> None:
        """Add a client to the rack. The rack joins the servers when its first client joins."""
        if not self.states:
            self.client = self.run.begin_rack(self)
            servers = range(len(self.run.shards))
            self.states = [rack.begin_rack(self.client, len(self.workers)) for _ in servers]
            self.copies: list[np.ndarray | None] = [None for _ in servers]
            self._payloads: dict[tuple[int, int, int], np.ndarray] = {}
            self.encoders = self.run.encoders(self.client)
            self.sent = {}
        for server, state in enumerate(self.states):
            self._do(server, rack.join_rack(self.run.model, state, worker))

    def leave(self, worker: int) -> None:
        """Remove a client from the rack.

        The rack leaves the servers when its last client leaves.
        """
        for server, state in enumerate(self.states):
            self._do(server, rack.leave_rack(self.run.model, state, worker))
        if self.states and not self.states[0].inner.members:
            self.states = []
            self.run.end_rack(self)

    def from_worker(self, server: int, message: Message, payload: np.ndarray | None) -> None:
        """Receive a worker's message for a server.

        Args:
          payload: the payload of a push, or None for any other message.
        """
        stamp = message.stamp
        if not self.states or stamp.client not in self.states[server].inner.members:
            return
        state = self.states[server]
        # A duplicate of a delivered message is ignored. The payload of a duplicate is not stored,
        # since it would never be freed.
        if stamp.sequence >= state.inner.inboxes[stamp.client].expected and payload is not None:
            self._payloads[server, stamp.client, stamp.sequence] = payload
        self._do(server, rack.from_worker(self.run.model, state, message, self.run.now))

    def hear(self, server: int, reply: Reply, payload: np.ndarray | None) -> None:
        """Receive a server's reply.

        Args:
          payload: the parameters in the reply, or None for a reply without parameters.
        """
        if reply.client != self.client or not self.states:
            return
        step = rack.from_root(self.run.model, self.states[server], reply)
        if step.takes:
            self.copies[server] = payload
        self._do(server, step)
        link = self.link(server)
        known = {} if link is None else link.under_way
        for key in [key for key in self.sent if key[0] == server and key[1] not in known]:
            del self.sent[key]

    def _do(self, server: int, step: RackStep) -> None:
        self.states[server] = step.state
        for effect in step.effects:
            match effect:
                case Forward():
                    self._forward(server, effect)
                case Ask():
                    self.ask(server, effect.message, None)
                case Drop():
                    self._payloads.pop((server, effect.client, effect.sequence), None)
                case _:
                    self._reply(server, effect)

    def _reply(self, server: int, reply: Reply) -> None:
        payload = None
        if isinstance(reply, Answer):
            outer = self.states[server].outer
            assert outer.version is not None
            assert client.ready(self.run.model, outer)
            self.run.reads.check(server, outer.clock, outer.version)
            payload = self.copies[server]
        self.run.tell_worker(self.node, server, reply, payload)

    def _forward(self, server: int, effect: Forward) -> None:
        def payload_of(one: Arrival) -> np.ndarray:
            return self._payloads[server, one.client, one.sequence]

        zeros = np.zeros_like(self.run.shards[server].arrays.params)
        total = combined(effect.merge, payload_of) if effect.merge.parts else zeros
        if effect.merge.parts and self.encoders:
            sequence = effect.message.stamp.sequence
            coded, finite = self.encoders[server].decoded(total, sequence)
            total = coded if finite else zeros
        for one in effect.merge.arrivals:
            del self._payloads[server, one.client, one.sequence]
        self.sent[server, effect.message.stamp.sequence] = total
        self.ask(server, effect.message, total)

    def link(self, server: int) -> ClientState | None:
        """Return the rack's state as a client of a server, or None if the rack has no workers."""
        return self.states[server].outer if self.states else None

    def ask(self, server: int, message: Message, payload: np.ndarray | None) -> None:
        """Send a message to a server."""
        self.run.ask_server(self.node, server, message, payload, self.again)
