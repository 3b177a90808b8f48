"""The retries of a client of the servers: a worker, or the aggregator of a rack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Message, Publish, Reply

if TYPE_CHECKING:
    from jaxdist.simulation.engine.run import Simulation


class RetryingClient(ABC):
    """A client that sends a message again if the message or its reply is lost.

    Attributes:
      client: the client's number in the protocol.
      sent: the payloads of unsettled pushes, by server and sequence.
    """

    def __init__(self, run: Simulation) -> None:
        self.run, self.client = run, -1
        self.sent: dict[tuple[int, int], np.ndarray] = {}

    @abstractmethod
    def link(self, server: int) -> ClientState | None:
        """Return the protocol's state for a server, or None while the client is away."""

    @abstractmethod
    def ask(self, server: int, message: Message, payload: np.ndarray | None) -> None:
        """Send a message for a server, with its payload if it is a push."""

    def again(self, server: int, message: Message) -> None:
        """Send a message again, unless its answer has arrived in the meantime."""
        link, sequence = self.link(server), message.stamp.sequence
        if link is None or message.stamp.client != self.client:
            return
        if sequence in link.under_way:
            self.ask(server, message, self.sent.get((server, sequence)))

    def lost_reply(self, server: int, reply: Reply) -> None:
        """Plan to send a message again, after the retry time, because its reply was lost."""
        link = self.link(server)
        if link is None or isinstance(reply, Publish) or reply.client != self.client:
            return
        message = link.under_way.get(reply.sequence)
        if message is not None:
            wait = self.run.config.link.retry_seconds
            self.run.after(wait, lambda: self.again(server, message))
