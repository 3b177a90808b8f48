"""The connections between a leader and the servers that copy its range, on both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from jaxdist.param_server.live.shard import ServerShard
from jaxdist.replication import codec
from jaxdist.replication.decision import Copied, Follower, Leader, LogEntry, RangeView
from jaxdist.wire.contract import Envelope, Op, Peer, Spec, Wire
from jaxdist.wire.frames import StrictService
from jaxdist.wire.kept import KeptSession

MOST_BYTES = 2**40
"""The largest size of an entry's state, or of a leaf of a snapshot, in bytes."""


class CopyLink(KeptSession):
    """A session with a follower; if the session ends, a thread opens another session.

    Args:
      opened: the function that is called with the link when a session begins. The function must
        send the unanswered entries again.
      copied: the function that is called with each answer of the follower.
    """

    def __init__(
        self, wire: Wire, opened: Callable[[CopyLink], None], copied: Callable[[Copied], None]
    ) -> None:
        def hear(envelope: Envelope) -> None:
            if envelope.op is Op.COPIED:
                copied(codec.to_copied(envelope))

        super().__init__(wire, opened, hear)


class CopyService(StrictService):
    """A `jaxdist.wire.contract.Service` that copies a range until its server leads the range.

    Args:
      server: the number of this server.
      shard: the arrays of the range, which the first entry overwrites.
    """

    sender = "a leader"

    def __init__(self, server: int, shard: ServerShard) -> None:
        self.shard, self.follower = shard, Follower(server)
        self._spec = shard.layout.spec
        self._arrays: dict[Peer, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def spec(self, envelope: Envelope) -> Spec | None:
        if envelope.op is Op.COPY:
            return self._spec
        if envelope.op in (Op.ENTRY, Op.WHOLE):
            return Spec(self._spec.tensor, np.dtype(np.uint8), MOST_BYTES)
        raise self.unexpected(envelope)

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        with self._lock:
            if envelope.op is not Op.ENTRY:
                assert envelope.payload is not None
                self._arrays.setdefault(peer, []).append(envelope.payload)
                return
            # The arrays of an entry arrive in separate envelopes before the envelope of the entry.
            arrays = self._arrays.pop(peer, [])
            self._entry(envelope, arrays)
            answer = codec.of_copied(self.follower.copied, self._spec.tensor)
        peer.say(answer)

    def _entry(self, envelope: Envelope, arrays: list[np.ndarray]) -> None:
        entry, updates = codec.to_entry(envelope)
        follower, takes = self.follower.follow(entry)
        if takes:
            self._take(entry, updates, arrays)
        self.follower = follower

    def _take(
        self, entry: LogEntry, updates: list[tuple[float, bool]], arrays: list[np.ndarray]
    ) -> None:
        if entry.whole:
            self.shard.restore(arrays)
            return
        given = iter(arrays)
        for rate, has in updates:
            if has:
                self.shard.move(next(given), rate)

    def takes_over(self, view: RangeView) -> Leader:
        """Return the leader of a new view; later entries of the earlier leader are refused."""
        with self._lock:
            leader = self.follower.takes_over(view)
            self.follower = Follower(self.follower.server, view.epoch, self.follower.index)
            return leader

    def left(self, peer: Peer) -> None:
        with self._lock:
            # The entry of these arrays will not arrive in this session, so the arrays are dropped.
            # The next session sends the entry and all its arrays again.
            self._arrays.pop(peer, None)
