"""Envelopes that wait to be sent, from any thread to the one that sends."""

from __future__ import annotations

import threading
from collections import deque

from jaxdist.param_server.wire.contract import CARRY_SHARD, Envelope, Op

MOST_WAITING = 512
"""A peer that reads nothing while so many wait is given up."""
MOST_SHARDS = 16
"""The same of a worker that reads no parameters: each may be another version of them."""


class Outbox:
    """A queue that ends, in which a publication takes the place of an older one.

    Args:
      payloads: at most so many envelopes with a payload wait; who reads none of them is given up.
        None is no limit of their own.
    """

    def __init__(self, payloads: int | None = None) -> None:
        self._most = payloads
        self._waiting: deque[Envelope] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, envelope: Envelope) -> bool:
        """Queue an envelope; False where the queue has ended, or ends because it is full."""
        with self._changed:
            if envelope.op is Op.PUBLISH:
                kept = (one for one in self._waiting if one.op is not Op.PUBLISH)
                self._waiting = deque(kept)
            if len(self._waiting) >= MOST_WAITING or self._full():
                self._closed = True
            if not self._closed:
                self._waiting.append(envelope)
            self._changed.notify_all()
            return not self._closed

    def _full(self) -> bool:
        if self._most is None:
            return False
        return sum(one.payload is not None and one.op in CARRY_SHARD for one in self._waiting) >= (
            self._most
        )

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
