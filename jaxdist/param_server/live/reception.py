"""The sessions of a server, and the payloads of pushes that are not settled."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from jaxdist.param_server.consistency.contract import Arrival
from jaxdist.param_server.live.codes import Codes
from jaxdist.param_server.live.envelopes import of_reply, to_message
from jaxdist.param_server.live.order import ProtocolCall
from jaxdist.param_server.protocol.messages import Message, Push, Refuse, Reply
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.wire.contract import (
    NO_SEQUENCE,
    OF_WORKERS,
    Envelope,
    Op,
    Peer,
    Spec,
)
from jaxdist.wire.frames import FrameError, spec_for, text_payload

MOST_REASONS = 64
"""The largest number of distinct reasons that a counter keeps."""
WAITING_BYTES = 256 * 2**20
"""The size of a client's waiting pushes, in bytes, above which the client's next pushes are
refused; four pushes are always allowed."""


@dataclass
class Counters:
    """The counters of a server's activity.

    Attributes:
      applied: the number of applied changes.
      dropped: the number of changes that were not applied, by reason.
      refused: the number of messages that changed nothing, by reason.
      received_bytes, sent_bytes: the total sizes of received and of sent payloads, in bytes.
      busy_seconds: the seconds spent on messages and updates.
    """

    applied: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    busy_seconds: float = 0.0

    @staticmethod
    def count(counter: Counter[str], reason: str) -> None:
        """Count a reason; every number in its text is replaced by `n`.

        The number of distinct reasons is bounded, since a peer could send new reasons without end.
        """
        kind = re.sub(r"-?\d+", "n", reason.split(":")[0])[:80]
        counter[kind if kind in counter or len(counter) < MOST_REASONS else "other"] += 1


class Reception(ABC):
    """A `jaxdist.wire.contract.Service` that receives the messages of clients for one range.

    This class handles sessions and payloads; subclasses handle the messages.

    Args:
      spec: the required shard, dtype and length of the parameters.
      codes: the encoding of pushes, or None for uncompressed pushes.
    """

    def __init__(self, spec: Spec, codes: Codes | None) -> None:
        self.counters = Counters()
        self._spec, self._codes, self._push_spec = spec, codes, codes.spec if codes else spec
        self._payloads: dict[tuple[int, int], np.ndarray] = {}
        self._waiting: Counter[int] = Counter()
        self._admitted: set[int] = set()
        self._peers: dict[int, Peer] = {}
        self._clients: dict[Peer, int] = {}
        self._begun = time.monotonic()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    @abstractmethod
    def _range(self) -> RangeState:
        """The current protocol state of the range."""

    @abstractmethod
    def _take(self, taken: ProtocolCall) -> None:
        """Execute a call of the protocol and its effects, in order.

        The caller holds the lock, here and in the methods below. The payload of a new push is
        already stored.
        """

    def _join(self, client: int) -> None:
        """Add a member."""
        self._take(ProtocolCall("join", self.seconds, client))

    def _resume(self, client: int, sequence: int) -> None:
        """Begin a session of a member.

        Args:
          client: the number of the member.
          sequence: the sequence before which the member has the final reply to every message.
        """
        # The default does nothing, since a server that did not take over has received all messages
        # itself.
        del client, sequence

    def _message(self, message: Message) -> None:
        """Process a member's message."""
        self._take(ProtocolCall("receive", self.seconds, message=message))

    def _late(self) -> str:
        """Return, as text, the names of the processes for which clients wait."""
        return f"clients {', '.join(map(str, self._range.late)) or 'none'}"

    def stats(self) -> dict[str, float]:
        """Return the counters of messages and payloads by name."""
        with self._changed:
            return {
                "received_bytes": self.counters.received_bytes,
                "sent_bytes": self.counters.sent_bytes,
                "dropped": sum(self.counters.dropped.values()),
                "refused": sum(self.counters.refused.values()),
            }

    def _payload_of(self, one: Arrival) -> np.ndarray:
        return self._payloads[one.client, one.sequence]

    @property
    def seconds(self) -> float:
        """The seconds since the start of the service."""
        return time.monotonic() - self._begun

    def admit(self, client: int) -> None:
        """Allow a client number to join. A number that was never admitted is refused."""
        with self._changed:
            self._admitted.add(client)

    def spec(self, envelope: Envelope) -> Spec | None:
        """Return the required form of a message's payload, or None if the message has no payload.

        Raises:
          FrameError: no worker may send the message, the message names another tensor or epoch than
            this server has, or too many pushes of the client wait already.
        """
        if envelope.op not in OF_WORKERS:
            raise FrameError(f"a worker may not send {envelope.op.name}", envelope)
        if envelope.tensor != self._spec.tensor:
            raise FrameError(
                f"this server has tensor {self._spec.tensor}, not {envelope.tensor}", envelope
            )
        if envelope.op is Op.PUSH:
            self._check_push(envelope)
        return spec_for(envelope, self._push_spec, self._spec)

    def _check_push(self, envelope: Envelope) -> None:
        with self._changed:
            state, waiting = self._range, self._waiting[envelope.client]
        if envelope.epoch != state.epoch:
            raise FrameError(
                f"epoch {envelope.epoch} differs from the epoch {state.epoch} of the range: "
                "request the current placement",
                envelope,
            )
        if envelope.client not in state.clocks.clocks:
            raise FrameError(f"client {envelope.client} is not a member: join first", envelope)
        size = self._spec.size_bytes
        if waiting * size > max(WAITING_BYTES, 4 * size):
            raise FrameError(
                f"client {envelope.client} already has {waiting} waiting pushes of {size} bytes, "
                "more than this server keeps for a client: wait for the answers",
                envelope,
            )

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        # Decoding and the check take long, and do not need the lock.
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
            self._refuse(
                peer, envelope, f"this session belongs to another client, not to {envelope.client}"
            )
        elif envelope.op is Op.LATE:
            peer.say(replace(envelope, op=Op.WAITING, payload=text_payload(self._late())))
        else:
            message = to_message(envelope)
            if isinstance(message, Push) and not finite:
                message = replace(message, usable=False)
            self._keep(envelope)
            self._message(message)

    def _hello(self, peer: Peer, envelope: Envelope) -> None:
        client = envelope.client
        if envelope.epoch != self._range.epoch:
            reason = (
                f"epoch {envelope.epoch} differs from the epoch {self._range.epoch} of the range"
            )
            return self._refuse(peer, envelope, reason)
        if client in self._admitted and client not in self._range.inboxes:
            self._join(client)
        elif client not in self._range.inboxes:
            reason = (
                f"client {client} is not expected: the supervisor assigns the numbers of clients"
            )
            return self._refuse(peer, envelope, reason)
        elif client not in self._range.clocks.clocks:
            reason = f"client {client} has left: use a number that was never used"
            return self._refuse(peer, envelope, reason)
        # A client may return before the server has noticed the end of its earlier session.
        before = self._peers.get(client)
        if before is not None and before is not peer:
            self._clients.pop(before, None)
            before.close()
        self._peers[client], self._clients[peer] = peer, client
        self._resume(client, envelope.sequence)
        return peer.say(Envelope(Op.WELCOME, self._range.epoch, client, tensor=self._spec.tensor))

    def _keep(self, envelope: Envelope) -> None:
        """Store the payload of a push that is not delivered yet."""
        key = envelope.client, envelope.sequence
        inbox = self._range.inboxes.get(envelope.client)
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
        if envelope is not None and envelope.client == client and envelope.op is not Op.HELLO:
            sequence = envelope.sequence
        refusal = Refuse(client, sequence, reason, self._range.epoch)
        peer.say(of_reply(refusal, self._spec.tensor, self._range.epoch))

    def left(self, peer: Peer) -> None:
        """Forget a session; the client may open a new session, unless the client was removed."""
        with self._changed:
            client = self._clients.pop(peer, None)
            if client is not None and self._peers.get(client) is peer:
                del self._peers[client]

    def _release(self, client: int, sequence: int) -> None:
        if self._payloads.pop((client, sequence), None) is not None:
            self._waiting[client] -= 1

    def _reply(self, reply: Reply, payload: np.ndarray | None = None) -> None:
        """Send a reply if the client has a session; otherwise the client asks again later.

        Args:
          payload: the parameters in the reply, or None for a reply without parameters.
        """
        if isinstance(reply, Refuse):
            self.counters.count(self.counters.refused, reply.reason)
        peer = self._peers.get(reply.client)
        if peer is not None:
            self.counters.sent_bytes += 0 if payload is None else payload.nbytes
            peer.say(of_reply(reply, self._spec.tensor, self._range.epoch, payload))

    def _dismissed(self, client: int) -> Peer | None:
        """Forget a client permanently, and return its session, or None if it has no session.

        The caller closes the session without the lock.
        """
        self._admitted.discard(client)
        return self._peers.pop(client, None)


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array holds no NaN and no infinity.

    >>> is_finite(np.array([3e38, 3e38], np.float32)), is_finite(np.array([1, np.nan]))
    (True, False)
    """
    if array.dtype.kind in "iu":
        return True
    with np.errstate(all="ignore"):
        # A finite sum proves in one pass that all values are finite. The sum of finite values may
        # overflow, hence the second test.
        return bool(np.isfinite(array.sum(dtype=array.dtype)) or np.isfinite(array).all())
