"""A worker's client of all table servers: pulls of unique rows, and pushes of their gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.client import Timeouts
from jaxdist.param_server.live.exchange import ServerLink, Sessions
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Answer, Reply
from jaxdist.tables.keys import servers_of
from jaxdist.tables.messages import pack
from jaxdist.wire.contract import Wire


class TableClient:
    """A worker's sessions with all table servers; only one thread may use the client.

    Args:
      number: the number of the client.
      model: the consistency model of the servers.
      wires: the connections to the leaders of the ranges, in the order of the ranges' numbers.
      width: the number of values in a row.
      most: the number of rows that servers keep, or 0 if they keep all rows.

    Attributes:
      sent_bytes, received_bytes: the total sizes of payloads.
      waited_seconds: the time spent in waits for servers, in seconds.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        wires: Sequence[Wire],
        width: int,
        *,
        most: int = 0,
        patience: Timeouts | None = None,
    ) -> None:
        self.number, self.model, self.width, self._most = number, model, width, most
        self.patience = patience or Timeouts()
        self._links = [
            ServerLink(server, wire, ClientState(number), f"table server {server}")
            for server, wire in enumerate(wires)
        ]
        self._failure: str | None = None
        self._rows: np.ndarray | None = None
        self._found: tuple[np.ndarray, list[int | None]] | None = None
        self._read: list[int | None] = [None for _ in self._links]
        self.sent_bytes = self.received_bytes = 0
        self.waited_seconds = 0.0
        self._exchange = Sessions(
            self._links,
            threading.RLock(),
            retry_seconds=self.patience.retry_seconds,
            heard=self._heard,
            failed=self.fail,
        )
        self._changed = self._exchange.changed

    def close(self) -> None:
        """End all sessions with table servers."""
        self._exchange.close()

    def fail(self, reason: str) -> None:
        """Make the call that waits now, or else the next call that waits, raise an error."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def pull(self, rows: np.ndarray) -> np.ndarray:
        """Return the values, float32 `[N, D]`, of unique rows (uint32 or keys, `[N]`).

        The consistency model determines which pushes the values include.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        if self._rows is None:
            self.begin(rows)
            return self.take()
        # The rows of the next step may have been requested already. They are received and kept
        # before `rows` are requested, since a server answers one pull after another.
        kept = self._found or self._finish(self._rows)
        found, _ = self._finish(rows, begins=True)
        self._found = kept
        return found

    def begin(self, rows: np.ndarray) -> None:
        """Ask for the values of unique rows without waiting; `take` returns the values."""
        assert self._rows is None, "an earlier pull is not taken"
        self._rows = rows
        self._ask(rows)

    def take(self) -> np.ndarray:
        """Wait for the values of the rows that `begin` asked for, and return these values.

        The client assumes that the gradients of the next push are computed from these values.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        assert self._rows is not None, "no pull has begun"
        found, self._read = self._found or self._finish(self._rows)
        self._rows = self._found = None
        return found

    def _ask(self, rows: np.ndarray) -> None:
        owner = servers_of(rows, len(self._links), self._most)
        with self._changed:
            for link in self._links:
                mine = pack(rows[owner == link.server])
                link.copy = None
                link.state, message = protocol.pull(link.state)
                link.payloads[message.stamp.sequence] = mine
                self.sent_bytes += mine.nbytes
                link.send(message)

    def _finish(
        self, rows: np.ndarray, *, begins: bool = False
    ) -> tuple[np.ndarray, list[int | None]]:
        """Wait for rows; return their values, and the version of each server's rows.

        The version of a server's rows is None before the first reply of this server.

        Args:
          rows: the rows, uint32 or keys.
          begins: whether to request the rows first.
        """
        if begins:
            self._ask(rows)
        owner = servers_of(rows, len(self._links), self._most)
        with self._changed:
            self._wait(lambda: all(one.copy is not None for one in self._links), "rows")
            found = np.empty((len(rows), self.width), np.float32)
            for link in self._links:
                assert link.copy is not None
                found[owner == link.server] = link.copy.view(np.float32).reshape(-1, self.width)
            return found, [link.state.version for link in self._links]

    def push(self, rows: np.ndarray, grads: np.ndarray, rate: float) -> None:
        """Send the gradients `[N, D]` of the unique rows that were pulled.

        The call waits only if too many earlier pushes are not acknowledged.

        Args:
          rate: the learning rate of the step.

        Raises:
          RunError: the deadline passed while too many pushes were not acknowledged.
        """
        owner = servers_of(rows, len(self._links), self._most)
        usable = bool(np.isfinite(grads).all())
        with self._changed:
            self._wait(lambda: all(link.state.room for link in self._links), "room for a push")
            for link, version in zip(self._links, self._read, strict=True):
                mine = owner == link.server
                payload = pack(np.array([rate], np.float32), rows[mine], grads[mine])
                link.state, message = protocol.push(link.state, version=version, usable=usable)
                link.payloads[message.stamp.sequence] = payload
                self.sent_bytes += payload.nbytes
                link.send(message)

    def move(self, server: int, wire: Wire, epoch: int) -> None:
        """Continue with the server that leads a range of rows in a new epoch.

        All messages without a final reply are sent again; the server applies each message only
        once. An epoch that is not new has no effect.

        Args:
          server: the number of the range.
          wire: the connection to the server that now leads the range.
          epoch: the number of the epoch.
        """
        with self._changed:
            if epoch > self._links[server].state.epoch:
                self._exchange.move(self._links[server], wire, epoch)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; the condition is checked again after each reply.

        Args:
          condition: a function that returns whether the condition holds.
          what: a description of the condition, for errors.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        with self._changed:
            self._wait(condition, what)

    def drain(self) -> None:
        """Wait until all pushes are acknowledged.

        Raises:
          RunError: the deadline passed, or a server refused a message or has died.
        """
        self.wait_until(self._settled, "the last pushes to be applied")

    def _settled(self) -> bool:
        return not any(link.payloads for link in self._links)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; the caller holds the lock.

        Args:
          condition: a function that returns whether the condition holds.
          what: a description of the condition, for the error message.
        """
        begun = time.monotonic()
        deadline = begun + self.patience.deadline_seconds
        while True:
            if self._failure is not None:
                raise RunError(f"worker {self.number}: {self._failure}")
            if condition():
                self.waited_seconds += time.monotonic() - begun
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunError(self._late(what))
            self._changed.wait(left)

    def _late(self, what: str) -> str:
        away = [link.name for link in self._links if not link.welcome]
        late = [link.name for link in self._links if link.welcome and link.payloads]
        told = f"{', '.join(away)} cannot be reached" if away else f"{', '.join(late)} is late"
        return (
            f"worker {self.number} waited {self.patience.deadline_seconds:g} s for {what}: {told} "
            "(strategy.processes.deadline_seconds)"
        )

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        heard = protocol.hear(link.state, reply)
        link.state = heard.state
        if isinstance(reply, Answer) and reply.sequence in link.payloads:
            assert payload is not None
            del link.payloads[reply.sequence]
            link.copy = payload
            self.received_bytes += payload.nbytes
        if heard.settled is not None:
            link.payloads.pop(heard.settled, None)
