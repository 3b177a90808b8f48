"""Envelopes that wait to be sent, from any thread to the one that sends."""

from __future__ import annotations

import threading
from collections import deque

from jaxdist.param_server.wire.contract import Envelope, Op

MOST_WAITING = 512
"""A peer that reads nothing while so many wait is given up."""


class Outbox:
    """A queue that ends, in which a publication takes the place of an older one."""

    def __init__(self) -> None:
        self._waiting: deque[Envelope] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, envelope: Envelope) -> bool:
        """Queue an envelope; False where the queue has ended, or ends because it is full."""
        with self._changed:
            if envelope.op is Op.PUBLISH:
                kept = (one for one in self._waiting if one.op is not Op.PUBLISH)
                self._waiting = deque(kept)
            if len(self._waiting) >= MOST_WAITING:
                self._closed = True
            if not self._closed:
                self._waiting.append(envelope)
            self._changed.notify_all()
            return not self._closed

    def take(self) -> Envelope | None:
        """The next envelope, waiting for it; None: the queue has ended."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def close(self) -> None:
        """End it; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)
