"""The messages between workers and a range.

The protocol never sees an array. A payload travels with its message, and is identified by the
message's client and sequence until the range decides on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.param_server.consistency.contract import Merge


@dataclass(frozen=True)
class Stamp:
    """The identification of a message.

    Attributes:
      epoch: the epoch of the placement, which the supervisor increments when ranges move; the range
        refuses messages of other epochs.
      client: a number that no other worker has ever used; a restarted worker gets a new number.
      sequence: the number of the message, counted from 0 over the client's messages to the range.
    """

    epoch: int
    client: int
    sequence: int


@dataclass(frozen=True)
class Pull:
    """A worker's request for the parameters of its next computation."""

    stamp: Stamp


@dataclass(frozen=True)
class Push:
    """A change that a worker sends.

    `jaxdist.param_server.consistency.contract.Arrival` describes the fields.
    """

    stamp: Stamp
    clock: int
    version: int
    tokens: float = 1.0
    usable: bool = True


Message = Pull | Push


@dataclass(frozen=True)
class Apply:
    """An order to merge payloads into the parameters, and the version after the merge."""

    merge: Merge
    version: int


@dataclass(frozen=True)
class Drop:
    """An order to drop a payload permanently."""

    client: int
    sequence: int
    reason: str


@dataclass(frozen=True)
class Acknowledge:
    """A reply to a client whose push is applied or dropped permanently.

    Attributes:
      version: the version that contains the push, or None if it was dropped.
    """

    client: int
    sequence: int
    version: int | None


@dataclass(frozen=True)
class Answer:
    """A reply to a client's pull, with the current parameters.

    Attributes:
      clock: the clock of the client's next computation.
      floor: a clock; the version contains all changes of all members from earlier clocks.
    """

    client: int
    sequence: int
    clock: int
    version: int
    floor: int


@dataclass(frozen=True)
class Publish:
    """A message with the current parameters, for a member that did not pull."""

    client: int
    version: int
    floor: int


@dataclass(frozen=True)
class Refuse:
    """A reply to a client whose message changed nothing.

    Attributes:
      epoch: the epoch of the range.
    """

    client: int
    sequence: int
    reason: str
    epoch: int


Reply = Acknowledge | Answer | Publish | Refuse
Effect = Apply | Drop | Reply
"""A server's action on its arrays, or a reply that it sends; actions are done in order."""
