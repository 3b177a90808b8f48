"""A leader's connections to the servers that copy it, and their side of the connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from jaxdist.param_server.live.shard import ServerShard
from jaxdist.replication import codec
from jaxdist.replication.decision import Copied, Follower, Leader, RangeView
from jaxdist.wire.contract import Envelope, Op, Peer, Session, Spec, Wire, WireError
from jaxdist.wire.frames import FrameError

AWAY_SECONDS = 0.05
MOST_BYTES = 2**32
"""Largest size of an entry's state, or of a leaf of a snapshot."""


class CopyLink:
    """A session with a follower, which a thread reopens when it ends.

    Args:
      opened: called when a session begins; entries without an answer must be sent again.
      copied: called with each answer of the follower.
    """

    def __init__(
        self, wire: Wire, opened: Callable[[CopyLink], None], copied: Callable[[Copied], None]
    ) -> None:
        self._wire, self._opened, self._copied = wire, opened, copied
        self._session: Session | None = None
        self._lost, self._closed = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="copies", daemon=True)
        self._keeper.start()

    def send(self, envelopes: Iterable[Envelope]) -> None:
        """Queue envelopes, which are lost if no session is open or the session ends."""
        session = self._session
        if session is not None:
            for one in envelopes:
                session.send(one)

    def close(self) -> None:
        """End the session, without a wait for the thread."""
        self._closed.set()
        self._lost.set()

    def _keep(self) -> None:
        while not self._closed.is_set():
            self._lost.clear()
            try:
                session = self._wire.open(self._hear, lambda reason: self._lost.set())
            except WireError:
                self._closed.wait(AWAY_SECONDS)
                continue
            self._session = session
            self._opened(self)
            self._lost.wait()
            self._session = None
            session.close()

    def _hear(self, envelope: Envelope) -> None:
        if envelope.op is Op.COPIED:
            self._copied(codec.to_copied(envelope))


class CopyService:
    """A `jaxdist.wire.contract.Service` that copies a range from its leader, until it leads itself.

    Args:
      server: number of this server.
      shard: arrays of the range, which the first entry overwrites.
      moved: called after each update with its version and the squared norm of its change.
    """

    def __init__(
        self,
        server: int,
        shard: ServerShard,
        moved: Callable[[int, float], None] = lambda version, square: None,
    ) -> None:
        self.shard, self.follower, self._moved = shard, Follower(server), moved
        self._spec = shard.layout.spec
        self._arrays: dict[Peer, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def spec(self, envelope: Envelope) -> Spec | None:
        if envelope.op is Op.COPY:
            return self._spec
        if envelope.op in (Op.ENTRY, Op.WHOLE):
            return Spec(self._spec.tensor, np.dtype(np.uint8), MOST_BYTES)
        raise FrameError(f"a leader may not send {envelope.op.name}", envelope)

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        with self._lock:
            if envelope.op is not Op.ENTRY:
                assert envelope.payload is not None
                self._arrays.setdefault(peer, []).append(envelope.payload)
                return
            arrays = self._arrays.pop(peer, [])
            self._entry(envelope, arrays)
            answer = codec.of_copied(self.follower.copied, self._spec.tensor)
        peer.say(answer)

    def _entry(self, envelope: Envelope, arrays: list[np.ndarray]) -> None:
        entry, updates = codec.to_entry(envelope)
        self.follower, takes = self.follower.follow(entry)
        if not takes:
            return
        if entry.whole:
            self.shard.load(*codec.restored(self.shard.arrays, arrays))
            return
        given = iter(arrays)
        last = entry.state.clocks.version
        for version, (rate, has) in enumerate(updates, last - len(updates) + 1):
            if has:
                self.shard.move(next(given), rate)
            self._moved(version, self.shard.square if has else 0.0)

    def takes_over(self, view: RangeView) -> Leader:
        """Return the leader of a new view; entries of the earlier leader are refused."""
        with self._lock:
            leader = self.follower.takes_over(view)
            self.follower = Follower(self.follower.server, view.epoch, self.follower.index)
            return leader

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        peer.close()

    def left(self, peer: Peer) -> None:
        with self._lock:
            self._arrays.pop(peer, None)
