"""What workers and a range say to one another.

The core never sees an array: a payload travels beside its message, and is named by the message's
client and sequence until the range says what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.param_server.consistency.contract import Merge


@dataclass(frozen=True)
class Stamp:
    """What every message carries.

    Attributes:
      epoch: of the placement; the supervisor raises it when ranges move; others are refused.
      client: a number that no other worker ever had; a worker that is restarted has a new one.
      sequence: 0, 1, 2, ... of this client's messages to this range.
    """

    epoch: int
    client: int
    sequence: int


@dataclass(frozen=True)
class Pull:
    """A worker wants parameters for its next computation."""

    stamp: Stamp


@dataclass(frozen=True)
class Push:
    """A worker's change; fields as in `jaxdist.param_server.consistency.contract.Arrival`."""

    stamp: Stamp
    clock: int
    version: int
    tokens: float = 1.0
    usable: bool = True


Message = Pull | Push


@dataclass(frozen=True)
class Apply:
    """Merge these payloads into the parameters, which then have this version."""

    merge: Merge
    version: int


@dataclass(frozen=True)
class Drop:
    """This payload is not applied, ever."""

    client: int
    sequence: int
    reason: str


@dataclass(frozen=True)
class Acknowledge:
    """To a client: its push is applied, or dropped, for good.

    Attributes:
      version: with it; None where it was dropped.
    """

    client: int
    sequence: int
    version: int | None


@dataclass(frozen=True)
class Answer:
    """To a client: the parameters as they are now, for its pull.

    Attributes:
      clock: what it computes next.
      floor: all changes of earlier clocks, of all members, are in this version.
    """

    client: int
    sequence: int
    clock: int
    version: int
    floor: int


@dataclass(frozen=True)
class Publish:
    """To a member that did not ask: the parameters as they are now."""

    client: int
    version: int
    floor: int


@dataclass(frozen=True)
class Refuse:
    """To a client: this message changed nothing.

    Attributes:
      epoch: of the range.
    """

    client: int
    sequence: int
    reason: str
    epoch: int


Reply = Acknowledge | Answer | Publish | Refuse
Effect = Apply | Drop | Reply
"""What a server does: to its arrays, or by sending something; in the order given."""
