"""A worker's side of one range: what it may compute from, and what it must send again."""

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
    """What a worker knows of a range.

    Attributes:
      sequence: of its next message.
      clock: of what it computes next.
      version: of its copy of the parameters; None: it has none yet.
      floor: of its copy.
      admitted: the newest clock that a pull was answered for.
      own: the version from which on all of its settled changes are in the parameters.
      under_way: its messages without a final reply, by sequence.
    """

    client: int
    epoch: int = 0
    sequence: int = 0
    clock: int = 0
    version: int | None = None
    floor: int = 0
    admitted: int = -1
    own: int = 0
    under_way: Mapping[int, Message] = field(default_factory=dict)

    @property
    def pulling(self) -> bool:
        """Is a pull without an answer?"""
        return any(isinstance(message, Pull) for message in self.under_way.values())

    @property
    def complete(self) -> bool:
        """Are all of its own changes in its copy, each once?

        What a change makes of parameters is the optimizer's, which the server runs: only the server
        can add it. So nothing is added here, and nothing can be twice.
        """
        pushing = any(isinstance(message, Push) for message in self.under_way.values())
        return not pushing and self.version is not None and self.version >= self.own

    @property
    def room(self) -> bool:
        """May it send one more message?"""
        return not self.under_way or self.sequence - min(self.under_way) < WINDOW


class Sending(NamedTuple):
    """The next state, and what to send."""

    state: ClientState
    message: Message


class Heard(NamedTuple):
    """The next state, and what a reply means.

    Attributes:
      takes: is its payload the worker's new copy of the parameters?
      settled: the push that needs no payload any more.
      refused: the reason; the message stays under way, to be sent again once that is mended.
    """

    state: ClientState
    takes: bool = False
    settled: int | None = None
    refused: str | None = None


def ready(model: Consistency, state: ClientState) -> bool:
    """May the worker compute from its copy?"""
    if state.version is None or (state.pulling and not model.ahead):
        return False
    if state.admitted < 0:
        return False  # a publication came first: it does not say at which clock a member joined
    if state.admitted == state.clock:
        return True  # it asked after its last push, which the server took before
    reusable = model.reuses and model.fresh(state.floor, state.clock)
    return reusable and (model.ahead or state.complete)


def pull(state: ClientState) -> Sending:
    """Ask for parameters: where `ready` says no, or when a computation begins (`model.ahead`)."""
    assert state.room
    assert not state.pulling
    return _send(state, Pull(Stamp(state.epoch, state.client, state.sequence)))


def push(
    state: ClientState, *, version: int | None = None, tokens: float = 1.0, usable: bool = True
) -> Sending:
    """Send what was computed; the clock moves on.

    Args:
      version: that it was computed from; None is the copy's, where no newer one has come since.
    """
    assert state.room
    assert state.version is not None, "nothing was read"
    stamp = Stamp(state.epoch, state.client, state.sequence)
    computed_from = state.version if version is None else version
    message = Push(stamp, state.clock, computed_from, tokens, usable)
    return _send(replace(state, clock=state.clock + 1), message)


def spoiled(state: ClientState, sequence: int) -> ClientState:
    """With a push under way, not sent yet, whose payload turns out to be unusable."""
    known = state.under_way[sequence]
    assert isinstance(known, Push)
    return replace(state, under_way={**state.under_way, sequence: replace(known, usable=False)})


def hear(state: ClientState, reply: Reply) -> Heard:
    """What a reply changes; one that was heard before, or came late, changes nothing."""
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
        own = max(state.own, reply.version or 0)  # what is dropped will be in no version
        return Heard(replace(state, own=own), settled=reply.sequence)
    clock = max(state.clock, reply.clock)
    return _newer(replace(state, clock=clock, admitted=reply.clock), reply)


def retries(state: ClientState) -> tuple[Message, ...]:
    """All that is to be sent again after a silence, oldest first."""
    return tuple(state.under_way[number] for number in sorted(state.under_way))


def moved(state: ClientState, epoch: int) -> ClientState:
    """In a new epoch, where everything under way is to be sent again."""
    under_way = {
        number: replace(message, stamp=replace(message.stamp, epoch=epoch))
        for number, message in state.under_way.items()
    }
    return replace(state, epoch=epoch, under_way=under_way)


def _send(state: ClientState, message: Message) -> Sending:
    under_way = {**state.under_way, state.sequence: message}
    return Sending(replace(state, sequence=state.sequence + 1, under_way=under_way), message)


def _newer(state: ClientState, reply: Answer | Publish) -> Heard:
    """An older version than the copy that came in the meantime is left."""
    if state.version is not None and reply.version < state.version:
        return Heard(state)
    return Heard(replace(state, version=reply.version, floor=reply.floor), takes=True)
