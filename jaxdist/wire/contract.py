"""The interface of a transport between workers and servers: sessions, and their envelopes.

A worker holds one `Session` with each server. Both sides may send envelopes at any time. If a
session ends, it is reopened, and unanswered messages are sent again. The protocol settles each
message once, however often the message arrives (`jaxdist.param_server.protocol`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from jaxdist.errors import RunError


class WireError(RunError):
    """The error for a peer that is unreachable, denies access, or violates the format."""


class RefusedError(WireError):
    """The error for a peer that denies access permanently, so that no retry can succeed."""


class Op(IntEnum):
    """The operation of an envelope between workers and servers, or between two servers."""

    HELLO = 1
    """The request that binds a session to a client, which joins if it is new."""
    PULL = 2
    PUSH = 3
    LATE = 4
    """The question which clients are late, so that an error message can name them."""
    WELCOME = 5
    ACKNOWLEDGE = 6
    ANSWER = 7
    PUBLISH = 8
    REFUSE = 9
    WAITING = 10
    """The answer to LATE, with the late clients as text."""
    COPY = 11
    """A merged change, which the leader of a range sends to its follower."""
    WHOLE = 12
    """A raw array of a range, which a server that begins to follow receives."""
    ENTRY = 13
    """The state of the protocol, which a leader sends to its follower after the arrays of the same
    log entry."""
    COPIED = 14
    """A follower's answer to ENTRY."""
    SECURE = 15
    """A worker's request in a round of secure aggregation. The field `sequence` has the stage of
    the round."""
    SECURED = 16
    """The answer to SECURE, for the same round and stage."""


NO_SEQUENCE = 2**64 - 1
"""The value of `sequence` in a refusal that does not answer a numbered message."""
CARRY_TEXT = frozenset({Op.REFUSE, Op.WAITING})
CARRY_BYTES = CARRY_TEXT | {Op.ENTRY, Op.WHOLE, Op.SECURE, Op.SECURED}
"""The operations whose payload may have any length up to a limit."""
CARRY_SHARD = frozenset({Op.PUSH, Op.ANSWER, Op.PUBLISH})
OF_WORKERS = frozenset({Op.HELLO, Op.PULL, Op.PUSH, Op.LATE})


@dataclass(frozen=True)
class Spec:
    """The required shard, dtype and length of a payload.

    Attributes:
      tensor: the number of the shard.
      length: the number of elements; a shard's ranges are concatenated.
      most: whether a payload may have fewer elements than `length`.
    """

    tensor: int
    dtype: np.dtype
    length: int
    most: bool = False

    @property
    def size_bytes(self) -> int:
        return self.length * self.dtype.itemsize


@dataclass(frozen=True)
class Envelope:
    """A message and its payload.

    Attributes:
      epoch, client, sequence: the fields of `jaxdist.param_server.protocol.messages.Stamp`.
      clock, version, floor, tokens: the fields of the message, or 0 for a field that this kind of
        message lacks.
      flag: for a push, whether the push is usable; for an acknowledgement, whether the push was
        applied; for an entry, whether the entry carries all arrays; for a follower's reply, whether
        its index is -1.
      payload: the elements `[n]`, or the bytes of a text, or None without a payload. A received
        payload is immutable.
    """

    op: Op
    epoch: int = 0
    client: int = 0
    sequence: int = 0
    clock: int = 0
    version: int = 0
    floor: int = 0
    tokens: float = 0.0
    flag: bool = False
    tensor: int = 0
    payload: np.ndarray | None = None

    @property
    def text(self) -> str:
        """The payload decoded as text."""
        return "" if self.payload is None else self.payload.tobytes().decode(errors="replace")


Hear = Callable[[Envelope], None]
"""The callback for the envelopes of a peer, which is called for one envelope at a time."""


class Session(Protocol):
    """A session, for the worker: envelopes arrive whole and in order, or the session ends."""

    def send(self, envelope: Envelope) -> None:
        """Queue an envelope, which may be lost if the session ends."""
        ...

    def close(self) -> None:
        """End the session; no envelope is received after this call."""
        ...


class Wire(Protocol):
    """A worker's connection to a server."""

    def open(self, hear: Hear, ended: Callable[[str], None]) -> Session:
        """Open a new session with the server.

        Args:
          hear: the function that is called with each envelope of the server.
          ended: the function that is called once, with the reason, if the session ends without
            `close`.

        Raises:
          WireError: the server cannot be reached, or refuses the session.
        """
        ...


class Peer(Protocol):
    """A session from the server's side, with a worker, a host or another server."""

    def say(self, envelope: Envelope) -> None:
        """Queue an envelope for this peer.

        A publication of parameters replaces an earlier publication that is still in the queue.
        """
        ...

    def close(self) -> None:
        """End the session with this peer."""
        ...


class Service(Protocol):
    """A server's handler of envelopes, which a separate thread for each session calls."""

    def spec(self, envelope: Envelope) -> Spec | None:
        """Return the specification of an envelope's payload, or None if no payload is allowed.

        Args:
          envelope: the envelope without its payload.

        Raises:
          FrameError: the envelope is refused, and no memory is allocated for its payload. The error
            has the reason.
        """
        ...

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        """Handle a complete envelope that a peer has sent."""
        ...

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        """Handle the refusal of an envelope of a peer.

        The argument `envelope` is None if the bytes of the peer could not be parsed.
        """
        ...

    def left(self, peer: Peer) -> None:
        """Handle the end of a peer's session."""
        ...
