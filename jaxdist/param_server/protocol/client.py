"""The client's side of the protocol for one range: reads, pushes and retries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.protocol.inbox import WINDOW
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Message,
    Publish,
    Pull,
    Push,
    Refuse,
    Reply,
    Stamp,
)


@dataclass(frozen=True)
class ClientState:
    """The state of a client for one range.

    Attributes:
      sequence: the sequence number of the next message.
      clock: the clock of the next computation.
      least: the smallest clock that the range accepts in the next push.
      version: the version of the client's copy of the parameters, or None without a copy.
      floor: the floor of the client's copy.
      admitted: the newest clock for which a pull was answered, or -1 before the first answer.
      own: the first version that contains all settled changes of the client.
      under_way: the messages without a final reply, by sequence.
    """

    client: int
    epoch: int = 0
    sequence: int = 0
    clock: int = 0
    least: int = 0
    version: int | None = None
    floor: int = 0
    admitted: int = -1
    own: int = 0
    under_way: Mapping[int, Message] = field(default_factory=dict)

    @property
    def pulling(self) -> bool:
        """Whether a pull is unanswered."""
        return any(isinstance(message, Pull) for message in self.under_way.values())

    @property
    def complete(self) -> bool:
        """Whether the client's copy contains each of the client's changes exactly once.

        Only the server can apply a change, because the server runs the optimizer. The client
        therefore adds nothing to its copy, and no change can be counted twice.
        """
        pushing = any(isinstance(message, Push) for message in self.under_way.values())
        return not pushing and self.version is not None and self.version >= self.own

    @property
    def room(self) -> bool:
        """Whether the client may send one more message."""
        return not self.under_way or self.sequence - min(self.under_way) < WINDOW


class Sending(NamedTuple):
    """The state of a client after it sends a message, and the message."""

    state: ClientState
    message: Message


class Heard(NamedTuple):
    """The state of a client after a reply from its server, and the effects of the reply.

    Attributes:
      takes: whether the reply's payload is the worker's new copy of the parameters.
      settled: the sequence of the push whose payload is no longer needed, or None if there is none.
      refused: the reason for a refusal, or None if nothing was refused. A refused message stays
        pending, and is sent again later.
    """

    state: ClientState
    takes: bool = False
    settled: int | None = None
    refused: str | None = None


def ready(model: Consistency, state: ClientState) -> bool:
    """Return whether the worker may compute from its copy of the parameters."""
    if state.version is None or (state.pulling and not model.ahead):
        return False
    if state.admitted < 0:
        # No pull was answered yet. Parameters that a server sends without a pull do not show the
        # clock of a new client.
        return False
    if state.admitted == state.clock:
        # The answered pull was sent after the last push, so the server has handled the last push
        # too. If the last push was for a round that was over here, the answer came before the push,
        # and has the parameters for the next computation.
        return True
    reusable = model.reuses and model.fresh(state.floor, state.clock)
    return reusable and (model.ahead or state.complete)


def pull(state: ClientState) -> Sending:
    """Return a message that pulls parameters for the next computation.

    No other pull may be pending.
    """
    assert state.room
    assert not state.pulling
    return _send(state, Pull(Stamp(state.epoch, state.client, state.sequence)))


def push(
    state: ClientState,
    *,
    clock: int | None = None,
    version: int | None = None,
    tokens: float = 1.0,
    usable: bool = True,
) -> Sending:
    """Return a message that pushes a computed change, and advance the clock.

    Args:
      clock: the clock of the computation, or None for the clock of this range. A worker of several
        ranges computes at the smallest of their clocks. A range with a later clock drops the
        change: if it were counted for the later clock, the last round could lack a push.
      version: the version from which the change was computed; None takes the version of the copy,
        which is correct if no newer copy has arrived since the computation began.
    """
    assert state.room
    assert state.version is not None, "nothing was read"
    stamp = Stamp(state.epoch, state.client, state.sequence)
    computed_from = state.version if version is None else version
    clock = state.clock if clock is None else max(clock, state.least)
    message = Push(stamp, clock, computed_from, tokens, usable)
    return _send(replace(state, clock=clock + 1, least=clock + 1), message)


def marked_unusable(state: ClientState, sequence: int) -> ClientState:
    """Return the state after a pending push, which is not sent yet, is marked as unusable."""
    known = state.under_way[sequence]
    assert isinstance(known, Push)
    return replace(state, under_way={**state.under_way, sequence: replace(known, usable=False)})


def hear(state: ClientState, reply: Reply) -> Heard:
    """Return a client's state after a reply; a repeated or late reply has no effect."""
    assert reply.client == state.client, f"a reply to client {reply.client}"
    if isinstance(reply, Publish):
        return _newer(state, reply)
    known = state.under_way.get(reply.sequence)
    if known is None:
        return Heard(state)
    if isinstance(reply, Refuse):
        return Heard(state, refused=reply.reason)
    rest = {number: one for number, one in state.under_way.items() if number != reply.sequence}
    state = replace(state, under_way=rest)
    if isinstance(reply, Acknowledge):
        # A dropped change is part of no version, so its reply has the version None.
        own = max(state.own, reply.version or 0)
        return Heard(replace(state, own=own), settled=reply.sequence)
    clock = max(state.clock, reply.clock)
    least = clock if state.admitted < 0 else state.least
    return _newer(replace(state, clock=clock, least=least, admitted=reply.clock), reply)


def retries(state: ClientState) -> tuple[Message, ...]:
    """Return all pending messages, oldest first, to be sent again if no reply arrives."""
    return tuple(state.under_way[number] for number in sorted(state.under_way))


def client_in_epoch(state: ClientState, epoch: int) -> ClientState:
    """Return the state in a new epoch, in which all pending messages are to be sent again."""
    under_way = {
        number: replace(message, stamp=replace(message.stamp, epoch=epoch))
        for number, message in state.under_way.items()
    }
    return replace(state, epoch=epoch, under_way=under_way)


def _send(state: ClientState, message: Message) -> Sending:
    under_way = {**state.under_way, state.sequence: message}
    return Sending(replace(state, sequence=state.sequence + 1, under_way=under_way), message)


def _newer(state: ClientState, reply: Answer | Publish) -> Heard:
    """Return the client's state with a reply's parameters, unless its copy is newer."""
    if state.version is not None and reply.version < state.version:
        return Heard(state)
    return Heard(replace(state, version=reply.version, floor=reply.floor), takes=True)
