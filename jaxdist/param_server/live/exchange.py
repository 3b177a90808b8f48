"""A client's sessions with servers; a new session sends unanswered messages again."""

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
from jaxdist.wire.contract import (
    NO_SEQUENCE,
    Envelope,
    Op,
    RefusedError,
    Session,
    Wire,
    WireError,
)

AWAY_SECONDS = 0.05
"""The seconds between two attempts to reach a server."""


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
      idle: whether no session is kept open, because the rack has no worker.
      asked: the unanswered request that is not a message of the protocol, or None if there is none.
    """

    def __init__(self, server: int, wire: Wire, state: ClientState, name: str) -> None:
        self.server, self.wire, self.state, self.name = server, wire, state, name
        self.copy: np.ndarray | None = None
        self.payloads: dict[int, np.ndarray] = {}
        self.welcome, self.late, self.idle = False, "", False
        self.session: Session | None = None
        self._over = threading.Event()
        self._asked: dict[int, float] = {}
        self._greeted = self._asked_seconds = 0.0
        self.asked: Envelope | None = None

    def send(self, message: Message) -> None:
        """Send a message with its payload, or leave it to the next session if none is open."""
        sequence = message.stamp.sequence
        self._asked[sequence] = time.monotonic()
        if self.session is not None and self.welcome:
            payload = self.payloads.get(sequence)
            self.session.send(of_message(message, self.server, payload))

    def ask(self, envelope: Envelope) -> None:
        """Replace any earlier request by a request that is repeated until an answer arrives."""
        self.asked, self._asked_seconds = envelope, time.monotonic()
        if self.session is not None and self.welcome:
            self.session.send(envelope)

    def ask_late(self) -> None:
        """Ask the server for which clients it waits."""
        if self.session is not None and self.welcome:
            self.session.send(self._envelope(Op.LATE))

    def again(self, before: float) -> None:
        """Send again the unanswered messages that were sent before a time of `time.monotonic`."""
        if not self.welcome:
            if self.session is not None and self._greeted <= before:
                self._greet(self.session)
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

    def opened(self, session: Session, over: threading.Event) -> None:
        """Start to use a new session, and bind the session to the client.

        Args:
          session: the new session.
          over: the event that is set when the session has ended.
        """
        self.session, self._over = session, over
        self._greet(session)

    def ended(self, over: threading.Event) -> Session | None:
        """Mark a session as ended.

        Return the session if the link still uses this session, and otherwise None.

        Args:
          over: the event of the session, which is set here.
        """
        over.set()
        if over is not self._over:
            return None
        session, self.session, self.welcome = self.session, None, False
        return session

    def begin(self, state: ClientState) -> None:
        """Switch the link to a new client with this state; the caller ends the old session."""
        self.state, self.copy, self.late = state, None, ""
        self.payloads, self._asked = {}, {}

    def end(self) -> Session | None:
        """Stop using the session; return it for the caller to close, or None if none is open."""
        return self.ended(self._over)

    def _greet(self, session: Session) -> None:
        self._greeted = time.monotonic()
        # All messages before `first` have had their final replies. A new server must know this.
        first = min(self.state.under_way, default=self.state.sequence)
        session.send(replace(self._envelope(Op.HELLO), sequence=first))

    def _envelope(self, op: Op) -> Envelope:
        return Envelope(op, self.state.epoch, self.state.client, tensor=self.server)


class Sessions:
    """The sessions of a client's links, which a thread keeps open.

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
        self.changed, self._lost = threading.Condition(lock), threading.Condition(lock)
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="sessions", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End all sessions; the caller must not hold the lock."""
        with self._lost:
            self._closed = True
            self._lost.notify_all()
        self._keeper.join()
        for link in self.links:
            if link.session is not None:
                link.session.close()

    def begin(self, link: ServerLink, state: ClientState) -> None:
        """Switch a link to a new client; the caller holds the lock."""
        link.begin(state)
        self._leave(link)

    def move(self, link: ServerLink, wire: Wire, epoch: int) -> None:
        """Connect a link to the server that leads in a new epoch; the caller holds the lock."""
        link.wire, link.state = wire, protocol.client_in_epoch(link.state, epoch)
        self._leave(link)
        # A new thread opens the session, since the keeper's thread may still wait for the earlier
        # server, which does not answer.
        threading.Thread(target=self._open, args=(link,), name="moved", daemon=True).start()

    def _leave(self, link: ServerLink) -> None:
        session = link.end()
        if session is not None:
            # Another thread closes the session, since closing may wait for the lock, which this
            # thread holds.
            threading.Thread(target=session.close, name="left", daemon=True).start()
        self._lost.notify_all()

    def wake(self) -> None:
        """Open a session for a link that is not idle any more; the caller holds the lock."""
        self._lost.notify_all()

    def _hear(self, link: ServerLink, over: threading.Event, envelope: Envelope) -> None:
        with self.changed:
            # Messages of an ended session are ignored, since the next session repeats them.
            if not over.is_set():
                self._take(link, envelope)
            self.changed.notify_all()

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

    def _keep(self) -> None:
        """Reopen sessions that ended, and send again messages that were unanswered for too long."""
        while True:
            with self._lost:
                if self._closed:
                    return
                before = time.monotonic() - self._retry_seconds
                for link in self.links:
                    link.again(before)
                away = [link for link in self.links if link.session is None and not link.idle]
                if not away:
                    # With this interval, a message is repeated at most a quarter of `retry_seconds`
                    # too late.
                    self._lost.wait(self._retry_seconds / 4)
            for link in away:
                self._open(link)
                time.sleep(AWAY_SECONDS)

    def _open(self, link: ServerLink) -> None:
        over, wire = threading.Event(), link.wire

        def ended(reason: str) -> None:
            with self.changed:
                link.ended(over)
                # A retry would present the same token, which the server has refused.
                if "UNAUTHENTICATED" in reason:
                    self._failed(f"{link.name} refuses to admit the client: {reason}")
                self.changed.notify_all()
                self._lost.notify_all()

        try:
            session = wire.open(lambda envelope: self._hear(link, over, envelope), ended)
        except RefusedError as error:
            with self.changed:
                self._failed(f"{link.name} refuses to admit the client: {error}")
                self.changed.notify_all()
            return
        except WireError:
            # The server may still be starting, or may be about to be replaced. The thread therefore
            # tries again.
            return
        with self.changed:
            # The session is closed if it is no longer needed: while it was opened, the last worker
            # may have left, or the range may have moved.
            needed = not (link.idle or link.session is not None or self._closed)
            needed = needed and link.wire is wire
            if needed and not over.is_set():  # The session may have ended before this thread got
                link.opened(session, over)  # the lock.
        if not needed:
            # This thread does not hold the lock here: `close` waits for the session's reader, which
            # may wait for the lock in `_hear`.
            session.close()
