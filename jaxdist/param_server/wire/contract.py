"""The contract of a wire, and what travels on it.

A worker holds one `Session` with each server. Both sides send envelopes whenever they want to; a
session that ends is opened again, and what had no answer is sent again: the protocol settles each
message once, however often it comes (`jaxdist.param_server.protocol`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from jaxdist.errors import RunError


class WireError(RunError):
    """A peer that cannot be reached, does not let us in, or does not keep to the format."""


class RefusedError(WireError):
    """A peer that is there and will never let us in, so that nothing is gained by trying again."""


class Op(IntEnum):
    """What an envelope says. The first four are a worker's, the others a server's."""

    HELLO = 1
    """This session is this client's; it joins if it is new."""
    PULL = 2
    PUSH = 3
    LATE = 4
    """Who is waited for? For the message of an error."""
    WELCOME = 5
    ACKNOWLEDGE = 6
    ANSWER = 7
    PUBLISH = 8
    REFUSE = 9
    WAITING = 10
    """The answer to LATE, as text."""


NO_SEQUENCE = 2**64 - 1
"""Of a refusal of something that had none."""
CARRY_TEXT = frozenset({Op.REFUSE, Op.WAITING})
CARRY_SHARD = frozenset({Op.PUSH, Op.ANSWER, Op.PUBLISH})
OF_WORKERS = frozenset({Op.HELLO, Op.PULL, Op.PUSH, Op.LATE})


@dataclass(frozen=True)
class Spec:
    """What a payload must be.

    Attributes:
      tensor: the number of the shard.
      length: elements; a shard's ranges lie end to end.
    """

    tensor: int
    dtype: np.dtype
    length: int

    @property
    def size_bytes(self) -> int:
        return self.length * self.dtype.itemsize


@dataclass(frozen=True)
class Envelope:
    """One message and its payload.

    Attributes:
      epoch, client, sequence: of `jaxdist.param_server.protocol.messages.Stamp`.
      clock, version, floor, tokens: of the messages that have them; 0 elsewhere.
      flag: usable of a push; of an acknowledgement, that it was applied.
      payload: elements `[n]`, or the bytes of a text; never changed once it is here.
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
        """Of a payload that is text."""
        return "" if self.payload is None else self.payload.tobytes().decode(errors="replace")


Hear = Callable[[Envelope], None]
"""Called with what the peer sends, one at a time."""


class Session(Protocol):
    """A worker's end. Envelopes arrive in order and whole, or the session ends."""

    def send(self, envelope: Envelope) -> None:
        """Queue an envelope; it may be lost where the session ends."""
        ...

    def close(self) -> None:
        """End it; nothing is heard after this."""
        ...


class Wire(Protocol):
    """How a worker reaches a server."""

    def open(self, hear: Hear, ended: Callable[[str], None]) -> Session:
        """A new session.

        Args:
          ended: called once with the reason where the session ends by itself.

        Raises:
          WireError: the server cannot be reached, or refuses.
        """
        ...


class Peer(Protocol):
    """A server's end of a session."""

    def say(self, envelope: Envelope) -> None:
        """Queue an envelope for the worker. Of publications that wait only the newest is sent."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class Service(Protocol):
    """What a server does with envelopes; called from one thread for each session."""

    def spec(self, envelope: Envelope) -> Spec | None:
        """What the payload of such an envelope must be; None: it has none.

        Args:
          envelope: without its payload.

        Raises:
          FrameError: it is not to be taken, with the reason; nothing is allocated for it.
        """
        ...

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        """A whole envelope."""
        ...

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        """Something that is no envelope, or none that is taken; as far as it could be read."""
        ...

    def left(self, peer: Peer) -> None:
        """The session has ended."""
        ...
