"""A worker's client of all servers, which exchanges messages while the worker computes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.live.codes import Codes, PushEncoder
from jaxdist.param_server.live.exchange import ServerLink, Sessions
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.client import ClientState
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


class Client:
    """A worker's sessions with all servers: a context manager, used by one thread.

    Args:
      number: the client number.
      model: the consistency model of the servers, or of a rack's aggregators.
      wires: the connections to the servers, or to aggregators in front of them, in the order of the
        layouts.
      codes: the encoding of pushes to each server, or () for uncompressed pushes.
      through: the prefix of the servers' names in error messages, for wires through aggregators.

    Attributes:
      waited_seconds: the seconds spent in `read`, `push` and `drain`.
      received_bytes, sent_bytes: the total sizes of received and of sent payloads, in bytes.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        layouts: Sequence[ShardLayout],
        wires: Sequence[Wire],
        *,
        codes: Sequence[Codes] = (),
        epoch: int = 0,
        patience: Timeouts | None = None,
        through: str = "",
    ) -> None:
        self.number, self.model, self.patience = number, model, patience or Timeouts()
        self._encoders = [PushEncoder(one, number) for one in codes]
        self._links = [
            ServerLink(
                layout.server,
                wire,
                ClientState(number, epoch),
                f"{through}server {layout.server}",
            )
            for layout, wire in zip(layouts, wires, strict=True)
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

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sessions; changes that are not acknowledged may or may not be applied."""
        self._exchange.close()

    @property
    def clock(self) -> int:
        """The clock at which the worker computes next."""
        return min(link.state.clock for link in self._links)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the last read, by server; newer copies may have arrived since."""
        return tuple(version or 0 for version in self._read)

    def read(self) -> list[np.ndarray]:
        """Wait until the worker may compute from its copies of all shards, and return the copies.

        Raises:
          RunError: the deadline passed, and the message names the late processes; or a server
            refused a message.
        """
        with self._changed:
            self._wait(self._ready, "parameters to compute from")
            if self._read[0] is None and isinstance(self.model, BSP):
                self._catch_up()
            if self.model.ahead:
                self._pull(ready=True)
            copies = [link.copy for link in self._links]
            self._read = [link.state.version for link in self._links]
        return [copy for copy in copies if copy is not None]

    def _catch_up(self) -> None:
        """Push zeros to each server that is a round behind another server.

        At the moment when this worker joins, the servers may be in different rounds. The worker
        must be in the same round at all servers, or its last push would wait for ever.
        """
        while any(link.state.clock < self._newest for link in self._links):
            for at, link in enumerate(self._links):
                if link.state.clock < self._newest:
                    assert link.copy is not None
                    self._push_to(at, np.zeros_like(link.copy), None, 0.0)
            self._wait(self._ready, "the servers to be in the same round")

    @property
    def _newest(self) -> int:
        return max(link.state.clock for link in self._links)

    def _ready(self) -> bool:
        # Each check tries to pull again, since no pull is sent on a link that has too many pending
        # messages.
        self._pull(ready=False)
        return all(protocol.ready(self.model, link.state) for link in self._links)

    def _pull(self, *, ready: bool) -> None:
        for link in self._links:
            state = link.state
            if protocol.ready(self.model, state) == ready and not state.pulling and state.room:
                link.state, message = protocol.pull(state)
                link.send(message)

    def push(self, changes: Sequence[np.ndarray], *, tokens: float = 1.0) -> None:
        """Send changes that were computed from the last read.

        The call waits only if too many messages are pending.

        The arrays of the changes must not be modified afterwards.

        Raises:
          RunError: the deadline passed, or a server refused a message, as for `read`.
        """
        with self._changed:
            self._wait(lambda: all(link.state.room for link in self._links), "room for a push")
            for at, (change, read) in enumerate(zip(changes, self._read, strict=True)):
                self._push_to(at, change, read, tokens)

    def _push_to(self, at: int, change: np.ndarray, read: int | None, tokens: float) -> None:
        link = self._links[at]
        change, usable = self._written(at, change, tokens)
        # Servers refuse a weight that is not finite; `_written` has already marked this push as
        # unusable.
        tokens = tokens if math.isfinite(tokens) else 1.0
        link.state, message = protocol.push(link.state, version=read, tokens=tokens, usable=usable)
        link.payloads[message.stamp.sequence] = change
        self.sent_bytes += change.nbytes
        link.send(message)

    def _written(self, at: int, change: np.ndarray, tokens: float) -> tuple[np.ndarray, bool]:
        """Return a change in the form that is sent, and whether the push is to be marked as usable.

        Servers check uncompressed changes for values that are not finite. A change with 0 tokens
        may be 0/0. Zeros are sent instead, without the encoder: servers would not apply the change,
        and the encoder's error feedback would be lost with the change. Zeros are also sent if the
        number of tokens is not finite.

        Args:
          at: the index of the server.
          change: the change of the server's shard.
          tokens: the weight of the change.
        """
        if tokens == 0 or not math.isfinite(tokens):
            spec = self._encoders[at].codes.spec if self._encoders else None
            zeros = np.zeros_like(change) if spec is None else np.zeros(spec.length, spec.dtype)
            return zeros, tokens == 0
        if not self._encoders:
            return change, True
        return self._encoders[at](change, self._links[at].state.sequence)

    def move(self, server: int, wire: Wire, epoch: int) -> None:
        """Continue with the server that leads a shard in a new epoch.

        An epoch that is not newer than the known epoch changes nothing. If the epoch is newer, all
        messages without a final reply are sent again, and the new server counts each message once.

        Args:
          server: the number of the shard.
          wire: the connection to the server that leads the shard now.
          epoch: the epoch of the new leader.
        """
        with self._changed:
            if epoch > self._links[server].state.epoch:
                self._exchange.move(self._links[server], wire, epoch)

    def under_way(self, server: int) -> list[np.ndarray]:
        """Return the changes that a server has not settled, as the server will decode them."""
        with self._changed:
            sent = dict(self._links[server].payloads)
        if not self._encoders:
            return list(sent.values())
        codes = self._encoders[server].codes
        return [codes.decode(payload, self.number, at) for at, payload in sent.items()]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; the condition is checked again after each reply.

        Args:
          what: a description of the condition, for the error message.

        Raises:
          RunError: the deadline passed, or a server refused a message, as for `read`.
        """
        with self._changed:
            self._wait(condition, what)

    def drain(self) -> None:
        """Wait until all pushes are settled.

        Raises:
          RunError: the deadline passed, or a server refused a message, as for `read`.
        """
        with self._changed:
            self._wait(self._settled, "the last pushes to be applied")

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
            elif not protocol.ready(self.model, link.state) or link.payloads:
                told.append(f"{link.name} is late")
        return (
            f"client {self.number} at clock {self.clock} waited {seconds:g} s for {what}: "
            f"{'; '.join(told) or 'no client is late'}"
        )

    def _secured(self, link: ServerLink, envelope: Envelope) -> None:
        """Ignore an answer of secure aggregation, for which this client has not asked."""

    def _failed(self, reason: str) -> None:
        self._failure = reason

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        heard = protocol.hear(link.state, reply)
        link.state = heard.state
        if heard.takes:
            assert payload is not None
            link.copy = payload
            self.received_bytes += payload.nbytes
        if heard.settled is not None:
            link.payloads.pop(heard.settled, None)
