"""The sessions of a client with servers; a new session sends unanswered messages again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxdist.param_server.live.envelopes import of_message, to_reply
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Message, Refuse, Reply
from jaxdist.wire.contract import NO_SEQUENCE, Envelope, Op, Wire
from jaxdist.wire.kept import KeptSession


class ServerLink:
    """A client's state for one server; all access requires the lock of the owning `Sessions`.

    Args:
      server: the number of the server, which is also the number of its shard.
      name: the name of the peer at the other end of the wire.

    Attributes:
      state: the current state of the protocol.
      copy: the newest parameters received, or None before the first parameters; set by the owner.
      payloads: the payloads of pushes that are not settled, by sequence; set by the owner.
      welcome: whether the server has bound the session to this client.
      late: the clients that the server waits for, as named in its last answer to `ask_late`.
      kept: the session that is kept open, or None if the rack has no worker.
      opening: the number of sessions that were kept open or given up; it identifies `kept`.
      asked: the unanswered request that is not a message of the protocol, or None if there is none.
    """

    def __init__(self, server: int, wire: Wire, state: ClientState, name: str) -> None:
        self.server, self.wire, self.state, self.name = server, wire, state, name
        self.copy: np.ndarray | None = None
        self.payloads: dict[int, np.ndarray] = {}
        self.welcome, self.late, self.opening = False, "", 0
        self.kept: KeptSession | None = None
        self._asked: dict[int, float] = {}
        self._greeted = self._asked_seconds = 0.0
        self.asked: Envelope | None = None

    def send(self, message: Message) -> None:
        """Send a message with its payload, or leave it to the next session if none is open."""
        sequence = message.stamp.sequence
        self._asked[sequence] = time.monotonic()
        if self.kept is not None and self.welcome:
            payload = self.payloads.get(sequence)
            self.kept.send([of_message(message, self.server, payload)])

    def ask(self, envelope: Envelope) -> None:
        """Replace any earlier request by a request that is repeated until an answer arrives."""
        self.asked, self._asked_seconds = envelope, time.monotonic()
        if self.kept is not None and self.welcome:
            self.kept.send([envelope])

    def ask_late(self) -> None:
        """Ask the server for which clients it waits."""
        if self.kept is not None and self.welcome:
            self.kept.send([self._envelope(Op.LATE)])

    def again(self, before: float) -> None:
        """Send again the unanswered messages that were sent before a time of `time.monotonic`."""
        if not self.welcome:
            if self.kept is not None and self._greeted <= before:
                self.greet(self.kept)
            return
        under_way = protocol.retries(self.state)
        kept = {message.stamp.sequence for message in under_way}
        self._asked = {number: at for number, at in self._asked.items() if number in kept}
        for message in under_way:
            if self._asked[message.stamp.sequence] <= before:
                self.send(message)
        if self.asked is not None and self._asked_seconds <= before:
            self.ask(self.asked)

    def welcomed(self) -> None:
        """Send all pending messages again, now that the server has accepted the session."""
        self.welcome = True
        self.again(math.inf)

    def begin(self, state: ClientState) -> None:
        """Switch the link to a new client with this state; the caller ends the old session."""
        self.state, self.copy, self.late = state, None, ""
        self.payloads, self._asked = {}, {}

    def greet(self, kept: KeptSession) -> None:
        """Bind the session to the client; messages follow when the server has agreed."""
        self.kept, self.welcome, self._greeted = kept, False, time.monotonic()
        # All messages before `first` have had their final replies. A new server must know this.
        first = min(self.state.under_way, default=self.state.sequence)
        kept.send([replace(self._envelope(Op.HELLO), sequence=first)])

    def _envelope(self, op: Op) -> Envelope:
        return Envelope(op, self.state.epoch, self.state.client, tensor=self.server)


class Sessions:
    """The sessions of a client's links, each of which a `KeptSession` keeps open.

    Args:
      lock: the lock of the owner, held during all callbacks.
      retry_seconds: the seconds without an answer after which a message is sent again.
      heard: the function that is called with each reply of the protocol and its payload.
      failed: the function that is called with the reason when a server's refusal makes progress
        impossible.
      secured: the function that is called with each answer of secure aggregation.

    Attributes:
      changed: the condition that is notified after every received envelope.
    """

    def __init__(
        self,
        links: Sequence[ServerLink],
        lock: threading.RLock,
        *,
        retry_seconds: float,
        heard: Callable[[ServerLink, Reply, np.ndarray | None], None],
        failed: Callable[[str], None],
        secured: Callable[[ServerLink, Envelope], None] = lambda link, envelope: None,
    ) -> None:
        self._secured = secured
        self.links, self._retry_seconds = tuple(links), retry_seconds
        self._heard, self._failed = heard, failed
        self.changed = threading.Condition(lock)
        self._closed = threading.Event()
        self._repeater = threading.Thread(target=self._repeat, name="sessions", daemon=True)
        with self.changed:
            for link in self.links:
                self.open(link)
        self._repeater.start()

    def close(self) -> None:
        """End all sessions; the caller must not hold the lock."""
        with self.changed:
            self._closed.set()
            kept = [link.kept for link in self.links if link.kept is not None]
            for link in self.links:
                self._end(link)
        # This thread does not hold the lock here, because a session that ends may wait for it.
        for one in kept:
            one.join()
        self._repeater.join()

    def begin(self, link: ServerLink, state: ClientState) -> None:
        """Switch a link to a new client without a session; the caller holds the lock."""
        self._end(link)
        link.begin(state)

    def move(self, link: ServerLink, wire: Wire, epoch: int) -> None:
        """Connect a link to the server that leads in a new epoch; the caller holds the lock."""
        link.wire, link.state = wire, protocol.client_in_epoch(link.state, epoch)
        self._end(link)
        self.open(link)

    def open(self, link: ServerLink) -> None:
        """Keep a session of a link open from now on; the caller holds the lock."""
        if self._closed.is_set():
            return
        link.opening += 1
        number = link.opening

        def opened(kept: KeptSession) -> None:
            with self.changed:
                if link.opening == number:
                    link.greet(kept)

        def hear(envelope: Envelope) -> None:
            with self.changed:
                # Messages of an earlier session are ignored, since the next session repeats them.
                if link.opening == number:
                    self._take(link, envelope)
                self.changed.notify_all()

        def ended(reason: str, denied: bool) -> None:
            with self.changed:
                if link.opening == number:
                    link.welcome = False
                    if denied:
                        self._failed(f"{link.name} refuses to admit the client: {reason}")
                self.changed.notify_all()

        link.kept = KeptSession(link.wire, opened, hear, ended)

    def _end(self, link: ServerLink) -> None:
        link.opening, link.welcome = link.opening + 1, False
        if link.kept is not None:
            link.kept.close()
            link.kept = None

    def _take(self, link: ServerLink, envelope: Envelope) -> None:
        if envelope.client != link.state.client:
            if envelope.op is Op.REFUSE:
                self._failed(f"{link.name} refused the client: {envelope.text}")
        elif envelope.op is Op.WELCOME:
            link.welcomed()
        elif envelope.op is Op.WAITING:
            link.late = envelope.text
        elif envelope.op is Op.SECURED:
            self._secured(link, envelope)
        else:
            reply = to_reply(envelope)
            if not isinstance(reply, Refuse):
                self._heard(link, reply, envelope.payload)
            elif reply.sequence == NO_SEQUENCE or reply.sequence in link.state.under_way:
                self._failed(f"{link.name} refused a message: {reply.reason}")

    def _repeat(self) -> None:
        """Send again the messages that were unanswered for too long."""
        # With this interval, a message is repeated at most a quarter of `retry_seconds` too late.
        while not self._closed.wait(self._retry_seconds / 4):
            with self.changed:
                for link in self.links:
                    link.again(time.monotonic() - self._retry_seconds)
