"""The aggregator of a rack: a range towards its workers, and a client towards the servers.

Its workers keep rounds (bsp) among themselves. Of each round it sends one push, the mean, weighted
by tokens; it acknowledges their pushes when its own is acknowledged, so that no worker believes of
a change that it is applied before it is, and answers their pulls when its own copy may be computed
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxdist.param_server.consistency.contract import Consistency, Merge
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.protocol import client, server
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Apply,
    Drop,
    Message,
    Push,
    Refuse,
    Reply,
)
from jaxdist.param_server.protocol.server import RangeState

WITHIN = BSP()


@dataclass(frozen=True)
class RackState:
    """What an aggregator knows of a range besides arrays.

    Attributes:
      inner: towards its workers; its versions are the rack's rounds, numbered as its pushes are.
      outer: towards the servers.
      read: the oldest version that workers were given for the open round.
      answers: to workers, which wait for the rack's own copy.
      owed: acknowledgements that wait for that of the rack's push, by its sequence.
    """

    inner: RangeState
    outer: ClientState
    read: int | None = None
    answers: tuple[Answer, ...] = ()
    owed: Mapping[int, tuple[Acknowledge, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Forward:
    """Combine the payloads of a merge and send them to the servers, beside this message.

    The result is kept until the message is acknowledged: it may have to be sent again.
    """

    merge: Merge
    message: Message


@dataclass(frozen=True)
class Ask:
    """Send this message, which has no payload, to the servers."""

    message: Message


RackEffect = Forward | Ask | Drop | Reply


class RackStep(NamedTuple):
    """The next state, and what to do, in this order: replies go to workers.

    Attributes:
      takes: is the payload of what was heard the rack's new copy of the parameters?
    """

    state: RackState
    effects: tuple[RackEffect, ...] = ()
    takes: bool = False


def begin(number: int, workers: int, *, epoch: int = 0) -> RackState:
    """An aggregator without workers.

    Args:
      number: as a client of the servers.
      workers: that its rack is planned with.
    """
    return RackState(server.begin(workers, epoch=epoch), ClientState(number, epoch))


def join(model: Consistency, state: RackState, worker: int) -> RackStep:
    """With a worker in the rack."""
    return _heard(model, state, server.join(WITHIN, state.inner, worker))


def leave(model: Consistency, state: RackState, worker: int) -> RackStep:
    """Without a worker: the rack's round no longer waits for it."""
    answers = tuple(one for one in state.answers if one.client != worker)
    state = replace(state, answers=answers)
    return _heard(model, state, server.leave(WITHIN, state.inner, worker))


def from_worker(model: Consistency, state: RackState, message: Message, now: float) -> RackStep:
    """A message of one of its workers."""
    stamp = message.stamp
    key = stamp.client, stamp.sequence
    told = (*state.answers, *(one for owed in state.owed.values() for one in owed))
    if any(key == (one.client, one.sequence) for one in told):
        return RackStep(state)
    known = state.inner.inboxes.get(stamp.client)
    news = known is not None and stamp.sequence >= known.expected
    if news and isinstance(message, Push) and not client.ready(model, state.outer):
        reason = "its rack has no parameters that it may compute from: pull first"
        return RackStep(state, (Refuse(*key, reason, state.inner.epoch),))
    return _heard(model, state, server.receive(WITHIN, state.inner, message, now))


def from_root(model: Consistency, state: RackState, reply: Reply) -> RackStep:
    """A reply of the servers: what waited for it goes to the workers."""
    heard = client.hear(state.outer, reply)
    effects: list[RackEffect] = []
    if heard.settled is not None:
        assert isinstance(reply, Acknowledge)
        dropped = reply.version is None
        settled = state.owed.get(heard.settled, ())
        effects += [replace(one, version=None) if dropped else one for one in settled]
    owed = {number: one for number, one in state.owed.items() if number != heard.settled}
    found = _numbered(model, replace(state, outer=heard.state, owed=owed))
    return RackStep(found.state, (*effects, *found.effects), heard.takes)


def _numbered(model: Consistency, state: RackState) -> RackStep:
    """Its rounds have the numbers of its pushes: where the servers say that it is at a later clock,
    because it has just joined or they went on without it, its workers are too.
    """
    clock = state.outer.clock
    if clock == state.inner.clocks.version:
        return _released(model, state)
    moved = (replace(one, clock=clock, version=clock, floor=clock) for one in state.answers)
    state = replace(state, answers=tuple(moved))
    return _heard(model, state, server.advanced(WITHIN, state.inner, clock))


def _heard(model: Consistency, state: RackState, step: server.Step) -> RackStep:
    """What the rack's own range decided: rounds go to the servers, replies may have to wait."""
    state = replace(state, inner=step.state)
    effects: list[RackEffect] = []
    sent: int | None = None
    for effect in step.effects:
        if isinstance(effect, Apply):
            state, forward = _forward(state, effect.merge)
            sent = forward.message.stamp.sequence
            effects.append(forward)
        elif isinstance(effect, Acknowledge) and sent is not None:
            owed = (*state.owed.get(sent, ()), effect)
            state = replace(state, owed={**state.owed, sent: owed})
        elif isinstance(effect, Answer):
            state = replace(state, answers=(*state.answers, effect))
        else:
            assert isinstance(effect, Drop | Refuse | Acknowledge)
            effects.append(effect)
    found = _released(model, state)
    return RackStep(found.state, (*effects, *found.effects))


def _forward(state: RackState, merge: Merge) -> tuple[RackState, Forward]:
    tokens = sum((part.arrival.tokens for part in merge.parts), start=0.0)
    # A round in which nobody has tokens is pushed with 0 tokens; where a NaN is the reason, as one.
    usable = bool(merge.parts) or all(one.tokens == 0 for one in merge.without)
    tokens = tokens if usable else 1.0
    outer, message = client.push(state.outer, version=state.read, tokens=tokens, usable=usable)
    return replace(state, outer=outer, read=None), Forward(merge, message)


def _released(model: Consistency, state: RackState) -> RackStep:
    """The answers that the rack's copy is good for; where it is not, one question for a newer."""
    if not state.answers:
        return RackStep(state)
    if client.ready(model, state.outer):
        given, now = state.read, state.outer.version
        read = now if given is None or now is None else min(given, now)
        return RackStep(replace(state, answers=(), read=read), state.answers)
    if state.outer.pulling:
        return RackStep(state)
    outer, message = client.pull(state.outer)
    return RackStep(replace(state, outer=outer), (Ask(message),))
