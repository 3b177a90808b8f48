"""A server: one shard behind a lock, driven by the protocol, reached by a wire."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxdist.param_server.consistency.contract import Arrival, Consistency
from jaxdist.param_server.live.codes import Codes
from jaxdist.param_server.live.order import OrderLog, Taken, step
from jaxdist.param_server.live.shard import Shard
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import (
    Answer,
    Apply,
    Drop,
    Publish,
    Push,
    Refuse,
    Reply,
)
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.wire.contract import OF_WORKERS, Envelope, Op, Peer, Spec
from jaxdist.param_server.wire.frames import FrameError, spec_for, text_payload
from jaxdist.param_server.wire.messages import of_reply, to_message

MOST_REASONS = 64
NO_SEQUENCE = 2**64 - 1
"""Of a refusal of something that had none."""
WAITING_BYTES = 256 * 2**20
"""What a client may have waiting here, or four of its pushes where that is more."""


@dataclass
class Counters:
    """What a server has done so far.

    Attributes:
      dropped: changes that were not applied, by reason.
      refused: messages that changed nothing, by reason.
      received_bytes, sent_bytes: of payloads.
      busy_seconds: spent on messages and updates, of all that passed.
    """

    applied: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    busy_seconds: float = 0.0

    @staticmethod
    def count(counter: Counter[str], reason: str) -> None:
        """One more for a reason, whatever its numbers; what a peer can say is no end of reasons."""
        kind = re.sub(r"-?\d+", "n", reason.split(":")[0])[:80]
        counter[kind if kind in counter or len(counter) < MOST_REASONS else "other"] += 1


@dataclass(frozen=True)
class Reached:
    """The shard as it is when all changes of earlier clocks are in it.

    Attributes:
      floor: that clock.
      params: never changed any more.
      optimizer: a copy of what the optimizer keeps.
    """

    floor: int
    version: int
    params: np.ndarray
    optimizer: object


class Server:
    """A `jaxdist.param_server.wire.contract.Service`.

    Args:
      state: of the protocol, with the first workers in it.
      codes: how pushes are written; None: as they are.
      due: clocks at which the shard is to be handed out, ascending.
      reached: called with the shard at each of them.
      applied: called after each update with its version and the squared norm of its change.
      log: of the order.
    """

    def __init__(
        self,
        shard: Shard,
        model: Consistency,
        state: RangeState,
        *,
        codes: Codes | None = None,
        due: Sequence[int] = (),
        reached: Callable[[Reached], None] = lambda reached: None,
        applied: Callable[[int, float], None] = lambda version, square: None,
        log: OrderLog | None = None,
    ) -> None:
        self.shard, self.model, self.state = shard, model, state
        self.counters = Counters()
        self._spec = shard.layout.spec
        self._codes, self._push_spec = codes, codes.spec if codes else shard.layout.spec
        self._due, self._reached, self._applied, self._log = list(due), reached, applied, log
        self._payloads: dict[tuple[int, int], np.ndarray] = {}
        self._waiting: Counter[int] = Counter()
        self._admitted: set[int] = set()
        self._peers: dict[int, Peer] = {}
        self._clients: dict[Peer, int] = {}
        self._begun = time.monotonic()
        self._changed = threading.Condition()
        self._closed = False
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    def close(self) -> None:
        """End its thread and its log; sessions are the wire's."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ticker.join()
        if self._log is not None:
            self._log.close()

    def join(self, client: int) -> None:
        """A new member, before it has a session."""
        with self._changed:
            self._take(Taken("join", self.seconds, client))

    def add_due(self, clock: int) -> None:
        """One more clock at which the shard is to be handed out; and none after it."""
        with self._changed:
            self._due = sorted({due for due in self._due if due < clock} | {clock})

    def stats(self) -> dict[str, float]:
        """What it counts, by name."""
        with self._changed:
            counters, staleness = self.counters, self.shard.staleness
            count = sum(staleness.values())
            total = sum(value * number for value, number in staleness.items())
            return {
                "floor": self.state.clocks.floor,
                "staleness_mean": total / count if count else 0.0,
                "staleness_max": max(staleness, default=0),
                "queue": len(self._payloads),
                "idle_share": 1 - counters.busy_seconds / max(self.seconds, 1e-9),
                "received_bytes": counters.received_bytes,
                "sent_bytes": counters.sent_bytes,
                "applied": counters.applied,
                "dropped": sum(counters.dropped.values()),
                "refused": sum(counters.refused.values()),
            }

    def admit(self, client: int) -> None:
        """Let this number, which nobody had, join by itself; no other can."""
        with self._changed:
            self._admitted.add(client)

    def leave(self, client: int) -> None:
        """A worker has gone for good: nobody waits for it any more."""
        with self._changed:
            self._take(Taken("leave", self.seconds, client))
            self.shard.forget(client)
            peer = self._peers.pop(client, None)
        if peer is not None:
            peer.close()

    def spec(self, envelope: Envelope) -> Spec | None:
        """What a worker may send, of those it has not yet too much of waiting here."""
        if envelope.op not in OF_WORKERS:
            raise FrameError(f"{envelope.op.name} is not a worker's to send", envelope)
        if envelope.tensor != self._spec.tensor:
            raise FrameError(
                f"tensor {envelope.tensor} is not here: this is {self._spec.tensor}", envelope
            )
        if envelope.op is Op.PUSH:
            self._check_push(envelope)
        return spec_for(envelope, self._push_spec, self._spec)

    def _check_push(self, envelope: Envelope) -> None:
        with self._changed:
            state, waiting = self.state, self._waiting[envelope.client]
        if envelope.epoch != state.epoch:
            raise FrameError(
                f"epoch {envelope.epoch} is not the range's, {state.epoch}: ask for the placement",
                envelope,
            )
        if envelope.client not in state.clocks.clocks:
            raise FrameError(f"client {envelope.client} is not a member: join first", envelope)
        size = self._spec.size_bytes
        if waiting * size > max(WAITING_BYTES, 4 * size):
            raise FrameError(f"{waiting} pushes of client {envelope.client} wait already", envelope)

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        begun = time.perf_counter()
        size = 0 if envelope.payload is None else envelope.payload.nbytes
        if self._codes is not None and envelope.payload is not None:
            change = self._codes.decode(envelope.payload, envelope.client, envelope.sequence)
            envelope = replace(envelope, payload=change)
        finite = envelope.payload is None or is_finite(envelope.payload)
        with self._changed:
            self.counters.received_bytes += size
            self._received(peer, envelope, finite)
            self.counters.busy_seconds += time.perf_counter() - begun
            self._changed.notify_all()

    def _received(self, peer: Peer, envelope: Envelope, finite: bool) -> None:
        if envelope.op is Op.HELLO:
            self._hello(peer, envelope)
        elif self._clients.get(peer) != envelope.client:
            self._refuse(peer, envelope, f"this session is not client {envelope.client}'s")
        elif envelope.op is Op.LATE:
            text = text_payload(f"clients {', '.join(map(str, self.state.late)) or 'none'}")
            peer.say(replace(envelope, op=Op.WAITING, payload=text))
        else:
            message = to_message(envelope)
            if isinstance(message, Push) and not finite:
                message = replace(message, usable=False)
            self._keep(envelope)
            self._take(Taken("receive", self.seconds, message=message))

    def _hello(self, peer: Peer, envelope: Envelope) -> None:
        client = envelope.client
        if envelope.epoch != self.state.epoch:
            reason = f"epoch {envelope.epoch} is not the range's, {self.state.epoch}"
            return self._refuse(peer, envelope, reason)
        if client in self._admitted and client not in self.state.inboxes:
            self._take(Taken("join", self.seconds, client))
        elif client not in self.state.inboxes:
            reason = f"client {client} is not expected: the supervisor gives out numbers"
            return self._refuse(peer, envelope, reason)
        elif client not in self.state.clocks.clocks:
            reason = f"client {client} has left: take a number that nobody had"
            return self._refuse(peer, envelope, reason)
        before = self._peers.get(client)
        if before is not None and before is not peer:
            self._clients.pop(before, None)
            before.close()
        self._peers[client], self._clients[peer] = peer, client
        return peer.say(Envelope(Op.WELCOME, self.state.epoch, client, tensor=self._spec.tensor))

    def _keep(self, envelope: Envelope) -> None:
        """The payload of a push that is not known yet."""
        key = envelope.client, envelope.sequence
        inbox = self.state.inboxes.get(envelope.client)
        if envelope.payload is None or inbox is None or key in self._payloads:
            return
        if inbox.expected <= envelope.sequence and inbox.accepts(envelope.sequence):
            self._payloads[key] = envelope.payload
            self._waiting[envelope.client] += 1

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        with self._changed:
            self._refuse(peer, envelope, reason)

    def _refuse(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        self.counters.count(self.counters.refused, reason)
        client, sequence = self._clients.get(peer, 0), NO_SEQUENCE
        if envelope is not None and envelope.client == client:
            sequence = envelope.sequence
        refusal = Refuse(client, sequence, reason, self.state.epoch)
        peer.say(of_reply(refusal, self._spec.tensor, self.state.epoch))

    def left(self, peer: Peer) -> None:
        """The worker may come back with another session: only a supervisor takes it for gone."""
        with self._changed:
            client = self._clients.pop(peer, None)
            if client is not None and self._peers.get(client) is peer:
                del self._peers[client]

    def _take(self, taken: Taken) -> None:
        """What the protocol says, in its order."""
        if self._log is not None:
            self._log.add(taken)
        found = step(self.model, self.state, taken)
        self.state = found.state
        for effect in found.effects:
            if isinstance(effect, Apply):
                self._apply(effect)
            elif isinstance(effect, Drop):
                self.counters.count(self.counters.dropped, effect.reason)
                self._release(effect.client, effect.sequence)
            else:
                self._reply(effect)
        while self._due and self.state.clocks.floor >= self._due[0]:
            clocks, shard = self.state.clocks, self.shard
            floor = self._due.pop(0)
            self._reached(Reached(floor, clocks.version, shard.params, shard.kept()))
            if self._log is not None:
                self._log.flush()

    def _apply(self, effect: Apply) -> None:
        def change_of(one: Arrival) -> np.ndarray:
            return self._payloads[one.client, one.sequence]

        self.shard.apply(effect.merge, change_of)
        self.counters.applied += len(effect.merge.parts)
        for arrival in effect.merge.arrivals:
            self._release(arrival.client, arrival.sequence)
        self._applied(effect.version, self.shard.square if effect.merge.parts else 0.0)

    def _release(self, client: int, sequence: int) -> None:
        if self._payloads.pop((client, sequence), None) is not None:
            self._waiting[client] -= 1

    def _reply(self, reply: Reply) -> None:
        if isinstance(reply, Refuse):
            self.counters.count(self.counters.refused, reply.reason)
        carries = isinstance(reply, Answer | Publish)
        payload = self.shard.read(reply.client, reply.version) if carries else None
        peer = self._peers.get(reply.client)
        if peer is None:
            return  # it asks again when it is back
        self.counters.sent_bytes += 0 if payload is None else payload.nbytes
        peer.say(of_reply(reply, self._spec.tensor, self.state.epoch, payload))

    def _tick(self) -> None:
        """Calls the protocol where time alone brings something about."""
        with self._changed:
            while not self._closed:
                wake = protocol.wake(self.model, self.state)
                now = self.seconds
                if wake is not None and wake <= now:
                    self._take(Taken("tick", now))
                    if protocol.wake(self.model, self.state) == wake:
                        self._changed.wait(0.01)  # the same again: not at once
                    continue
                self._changed.wait(None if wake is None else wake - now)


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds no NaN and no infinity.

    >>> is_finite(np.array([3e38, 3e38], np.float32)), is_finite(np.array([1, np.nan]))
    (True, False)
    """
    if array.dtype.kind in "iu":
        return True
    with np.errstate(all="ignore"):
        # In one pass: whatever is not finite leaves the sum so. A sum may also overflow by itself.
        return bool(np.isfinite(array.sum(dtype=array.dtype)) or np.isfinite(array).all())
