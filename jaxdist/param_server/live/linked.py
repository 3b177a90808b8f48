"""The waits and the sessions that all clients of servers share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.exchange import ServerLink, Sessions
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.client import ClientState, Heard, Sending
from jaxdist.param_server.protocol.messages import Reply
from jaxdist.wire.contract import Envelope, Wire


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of a worker.

    Attributes:
      deadline_seconds: the time limit of any wait, in seconds. A worker that reaches the limit
        fails, and its error names the late process.
      retry_seconds: the seconds without an answer after which a message is sent again. An open
        stream loses no message; when a stream ends, all pending messages are sent again at once.
    """

    deadline_seconds: float = 600.0
    retry_seconds: float = 30.0


class LinkedClient(AbstractContextManager):
    """A worker's sessions with all servers: a context manager, used by one thread.

    Subclasses process the replies of servers in `_heard`.

    Args:
      names: the number and the name of each server, for error messages.
      wires: the connections to the servers, in the same order.

    Attributes:
      waited_seconds: the seconds spent in waits for servers.
      received_bytes, sent_bytes: the total sizes of received and of sent payloads, in bytes.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        names: Sequence[tuple[int, str]],
        wires: Sequence[Wire],
        *,
        epoch: int = 0,
        patience: Timeouts | None = None,
    ) -> None:
        self.number, self.model, self.patience = number, model, patience or Timeouts()
        self._links = [
            ServerLink(server, wire, ClientState(number, epoch), name)
            for (server, name), wire in zip(names, wires, strict=True)
        ]
        self._read: list[int | None] = [None for _ in self._links]
        self._failure: str | None = None
        self.waited_seconds = 0.0
        self.received_bytes = self.sent_bytes = 0
        self._exchange = Sessions(
            self._links,
            threading.RLock(),
            retry_seconds=self.patience.retry_seconds,
            heard=self._heard,
            failed=self._failed,
            secured=self._secured,
        )
        self._changed = self._exchange.changed

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sessions; changes that are not acknowledged may or may not be applied."""
        self._exchange.close()

    @property
    def clock(self) -> int:
        """The clock at which the worker computes next."""
        return min(link.state.clock for link in self._links)

    def fail(self, reason: str) -> None:
        """Make the call that waits now, or else the next call that waits, raise an error."""
        with self._changed:
            self._failed(reason)
            self._changed.notify_all()

    def _failed(self, reason: str) -> None:
        self._failure = reason

    def move(self, server: int, wire: Wire, epoch: int) -> None:
        """Continue with the server that leads a range in a new epoch.

        An epoch that is not newer than the known epoch changes nothing. If the epoch is newer, all
        messages without a final reply are sent again, and the new server counts each message once.

        Args:
          server: the number of the range.
          wire: the connection to the server that leads the range now.
          epoch: the epoch of the new leader.
        """
        with self._changed:
            if epoch > self._links[server].state.epoch:
                self._exchange.move(self._links[server], wire, epoch)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; the condition is checked again after each reply.

        Args:
          what: a description of the condition, for the error message.

        Raises:
          RunError: the deadline passed, or a server refused a message.
        """
        with self._changed:
            self._wait(condition, what)

    def drain(self) -> None:
        """Wait until all pushes are settled.

        Raises:
          RunError: the deadline passed, or a server refused a message.
        """
        self.wait_until(
            lambda: not any(link.payloads for link in self._links), "the last pushes to be applied"
        )

    def _wait_for_room(self) -> None:
        self._wait(lambda: all(link.state.room for link in self._links), "room for a push")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; the caller holds the lock.

        Args:
          condition: a function that returns whether the condition holds.
          what: a description of the condition, for the error message.
        """
        begun = time.monotonic()
        deadline = begun + self.patience.deadline_seconds
        asked = False
        try:
            while True:
                if self._failure is not None:
                    raise RunError(f"client {self.number}: {self._failure}")
                if condition():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RunError(self._late(what))
                # The servers are asked at half of the deadline, so that an error can name the late
                # clients.
                if not asked and left < self.patience.deadline_seconds / 2:
                    asked = True
                    for link in self._links:
                        link.ask_late()
                self._changed.wait(min(left, self.patience.deadline_seconds / 2))
        finally:
            self.waited_seconds += time.monotonic() - begun

    def _late(self, what: str) -> str:
        seconds = self.patience.deadline_seconds
        told: list[str] = []
        for link in self._links:
            if not link.welcome:
                told.append(f"{link.name} cannot be reached")
            elif link.late:
                told.append(f"{link.name} waits for {link.late}")
            elif link.state.under_way:
                told.append(f"{link.name} is late")
        return (
            f"client {self.number} at clock {self.clock} waited {seconds:g} s for {what}: "
            f"{'; '.join(told) or 'no client is late'} (strategy.processes.deadline_seconds)"
        )

    def _secured(self, link: ServerLink, envelope: Envelope) -> None:
        """Ignore an answer of secure aggregation, for which this client has not asked."""

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        raise NotImplementedError

    def _settle(self, link: ServerLink, reply: Reply) -> Heard:
        """Change the state of a link after a reply, and drop the payload that is settled."""
        heard = protocol.hear(link.state, reply)
        link.state = heard.state
        if heard.settled is not None:
            link.payloads.pop(heard.settled, None)
        return heard

    def _take(self, link: ServerLink, payload: np.ndarray | None) -> None:
        assert payload is not None
        link.copy = payload
        self.received_bytes += payload.nbytes

    def _send(self, link: ServerLink, sending: Sending, payload: np.ndarray) -> None:
        link.state, message = sending
        link.payloads[message.stamp.sequence] = payload
        self.sent_bytes += payload.nbytes
        link.send(message)
