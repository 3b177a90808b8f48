"""A queue of envelopes from any thread to the thread that sends them."""

from __future__ import annotations

import threading
from collections import deque

from jaxdist.wire.contract import CARRY_SHARD, Envelope, Op

MOST_WAITING = 512
"""The number of queued envelopes at which a peer that reads nothing is disconnected."""
MOST_SHARDS = 16
"""The number of queued payloads at which a worker is disconnected. Each payload may keep another
version of the parameters in memory."""


class Outbox:
    """A queue that can be closed, and that keeps only the newest publication of parameters.

    Args:
      payloads: the number of queued payloads of parameters or changes at which the peer is
        disconnected, or None for no separate limit.
    """

    def __init__(self, payloads: int | None = None) -> None:
        self._most = payloads
        self._waiting: deque[Envelope] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, envelope: Envelope) -> bool:
        """Queue an envelope, and return whether the queue is still open.

        If the queue has too many envelopes or payloads already, it is closed instead.
        """
        with self._changed:
            if envelope.op is Op.PUBLISH:
                kept = (one for one in self._waiting if one.op is not Op.PUBLISH)
                self._waiting = deque(kept)
            shards = sum(one.payload is not None and one.op in CARRY_SHARD for one in self._waiting)
            full = self._most is not None and shards >= self._most
            if len(self._waiting) >= MOST_WAITING or full:
                self._closed = True
            if not self._closed:
                self._waiting.append(envelope)
            self._changed.notify_all()
            return not self._closed

    def take(self) -> Envelope | None:
        """Wait for the next envelope and return it, or None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popleft()

    def close(self) -> None:
        """Close the queue and drop its envelopes."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)
