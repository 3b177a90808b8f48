"""A session that a thread reopens, and a board with which a process shows a text to its peers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxdist.wire.contract import (
    Envelope,
    Hear,
    Op,
    Peer,
    RefusedError,
    Session,
    Spec,
    Wire,
    WireError,
)
from jaxdist.wire.frames import TEXT_BYTES, StrictService, text_payload

AWAY_SECONDS = 0.05


class KeptSession:
    """A session with a peer; if the session ends, a thread opens another session.

    Args:
      opened: the function that is called with this object when a session begins; envelopes that
        were sent earlier may be lost.
      hear: the function that is called with each envelope of the peer.
      ended: the function that is called when a session has ended, or could not begin because the
        peer denies access. Its arguments are the reason, and whether the peer denies access.
    """

    def __init__(
        self,
        wire: Wire,
        opened: Callable[[Any], None],
        hear: Hear,
        ended: Callable[[str, bool], None] = lambda reason, denied: None,
    ) -> None:
        self._wire, self._opened, self._hear, self._ended = wire, opened, hear, ended
        self._session: Session | None = None
        self._lost, self._closed = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kept session", daemon=True)
        self._keeper.start()

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Queue envelopes, which are lost if no session is open or the session ends."""
        session = self._session
        if session is not None:
            for one in envelopes:
                session.send(one)

    def close(self) -> None:
        """End the session, and open no other session; do not wait for the session's thread."""
        self._closed.set()
        self._lost.set()

    def join(self) -> None:
        """Wait until the session that `close` has ended calls no function any more."""
        self._keeper.join()

    def _keep(self) -> None:
        while True:
            # The event is cleared before `open`, because a session may end before `open` returns.
            # The event is also cleared before the check: after the check, `clear` could undo the
            # `set` of a concurrent `close`.
            self._lost.clear()
            if self._closed.is_set():
                return
            try:
                session = self._wire.open(self._hear, self._over)
            except WireError as error:
                # The peer may still be starting, or may be about to be replaced. The thread
                # therefore tries again.
                if isinstance(error, RefusedError):
                    self._ended(str(error), True)
                self._closed.wait(AWAY_SECONDS)
                continue
            self._session = session
            self._opened(self)
            self._lost.wait()
            self._session = None
            session.close()
            # A peer may end each session at once, for example if it denies access.
            self._closed.wait(AWAY_SECONDS)

    def _over(self, reason: str) -> None:
        # A retry would present the same token, which the peer has refused.
        self._ended(reason, "UNAUTHENTICATED" in reason)
        self._lost.set()


class Board(StrictService):
    """A `jaxdist.wire.contract.Service` that sends peers a text on request and at each change."""

    sender = "a reader of a board"

    def __init__(self, text: str) -> None:
        self._text = text
        self._peers: set[Peer] = set()
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Replace the text of the board, and send the new text to all peers."""
        with self._lock:
            self._text = text
            for peer in self._peers:
                self._say(peer)

    def _say(self, peer: Peer) -> None:
        peer.say(Envelope(Op.WAITING, payload=text_payload(self._text)))

    def spec(self, envelope: Envelope) -> Spec | None:
        if envelope.op is not Op.LATE:
            raise self.unexpected(envelope)
        return None

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        with self._lock:
            self._peers.add(peer)
            self._say(peer)

    def left(self, peer: Peer) -> None:
        with self._lock:
            self._peers.discard(peer)


def spec_of_board(envelope: Envelope) -> Spec | None:
    """Return the specification of the payload that a `Board` sends."""
    return Spec(envelope.tensor, np.dtype(np.uint8), TEXT_BYTES)


def read_board(wire: Wire, seen: Callable[[str], None]) -> KeptSession:
    """Call `seen` with the text of a `Board`, now and at each change.

    The calls end when the returned session is closed.
    """
    return KeptSession(
        wire, lambda kept: kept.send([Envelope(Op.LATE)]), lambda envelope: seen(envelope.text)
    )
