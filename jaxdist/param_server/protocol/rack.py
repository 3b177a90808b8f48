"""The aggregator of a rack, which is a server to its workers and a client of the servers.

The workers of a rack run in rounds (bsp). For each round the aggregator sends one push, the mean
weighted by tokens. The aggregator acknowledges the workers' pushes when its own push is
acknowledged, so that no worker assumes too early that a change is applied. The aggregator answers
the workers' pulls when the consistency model allows computation from the aggregator's copy.

Every function that changes the state returns a `RackStep`: the next state, and the effects in
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxdist.param_server.consistency.contract import Clocks, Consistency, Merge
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
"""The consistency model of the workers within a rack."""


@dataclass(frozen=True)
class RackState:
    """The state of an aggregator for one range, without arrays.

    Attributes:
      inner: the state of the protocol with the workers. The versions of this state are the rounds
        of the rack, numbered like the rack's pushes.
      outer: the state of the protocol with the servers.
      read: the oldest version that workers received for the open round, or None before the first
        answer.
      answers: the answers to workers, held back until workers may compute from the rack's own copy.
      owed: the acknowledgements held back until the rack's push is acknowledged, by the push's
        sequence.
    """

    inner: RangeState
    outer: ClientState
    read: int | None = None
    answers: tuple[Answer, ...] = ()
    owed: Mapping[int, tuple[Acknowledge, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Forward:
    """An order to combine the payloads of a merge and send the result to the servers.

    The result is kept until the message is acknowledged, in case it must be sent again.
    """

    merge: Merge
    message: Message


@dataclass(frozen=True)
class Ask:
    """An order to send a message without a payload to the servers."""

    message: Message


RackEffect = Forward | Ask | Drop | Reply


class RackStep(NamedTuple):
    """The state of a rack after a call of the protocol, and the call's effects, in order.

    Attributes:
      takes: whether the reply's payload is the rack's new copy of the parameters.
    """

    state: RackState
    effects: tuple[RackEffect, ...] = ()
    takes: bool = False


def begin_rack(number: int, workers: int) -> RackState:
    """Return an aggregator without workers.

    Args:
      number: the rack's number as a client of the servers.
      workers: the number of workers for which the rack is planned.
    """
    return RackState(RangeState(Clocks(workers)), ClientState(number))


def join_rack(model: Consistency, state: RackState, worker: int) -> RackStep:
    """Add a worker to the rack."""
    return _heard(model, state, server.join(WITHIN, state.inner, worker))


def leave_rack(model: Consistency, state: RackState, worker: int) -> RackStep:
    """Remove a worker, so that the rack's round no longer waits for the worker."""
    answers = tuple(one for one in state.answers if one.client != worker)
    state = replace(state, answers=answers)
    return _heard(model, state, server.leave(WITHIN, state.inner, worker))


def from_worker(model: Consistency, state: RackState, message: Message, now: float) -> RackStep:
    """Process a message of one of the rack's workers."""
    stamp = message.stamp
    key = stamp.client, stamp.sequence
    told = (*state.answers, *(one for owed in state.owed.values() for one in owed))
    if any(key == (one.client, one.sequence) for one in told):
        return RackStep(state)  # The reply to this message is still held back.
    known = state.inner.inboxes.get(stamp.client)
    news = known is not None and stamp.sequence >= known.expected
    if news and isinstance(message, Push) and not client.ready(model, state.outer):
        reason = "its rack has no parameters recent enough to compute from: pull first"
        return RackStep(state, (Refuse(*key, reason, state.inner.epoch),))
    return _heard(model, state, server.receive(WITHIN, state.inner, message, now))


def from_root(model: Consistency, state: RackState, reply: Reply) -> RackStep:
    """Process a server's reply, and release the replies to workers that depend on this reply."""
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
    """Advance the rack's rounds to the clock of the rack's next push.

    The servers put the rack at a later clock if the rack has just joined, or if the servers have
    continued without the rack.
    """
    clock = state.outer.clock
    if clock == state.inner.clocks.version:
        return _released(model, state)
    moved = (replace(one, clock=clock, version=clock, floor=clock) for one in state.answers)
    state = replace(state, answers=tuple(moved))
    return _heard(model, state, server.advanced(WITHIN, state.inner, clock))


def _heard(model: Consistency, state: RackState, step: server.Step) -> RackStep:
    """Turn a step of the rack's own range into effects: forward rounds, and hold back replies."""
    state = replace(state, inner=step.state)
    effects: list[RackEffect] = []
    sent: int | None = None
    for effect in step.effects:
        if isinstance(effect, Apply):
            state, forward = _forward(state, effect.merge)
            sent = forward.message.stamp.sequence
            effects.append(forward)
        # An acknowledgement without a merge before it is for a dropped change, and need not wait
        # for a reply from the servers.
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
    # A round without tokens is pushed with 0 tokens. A round that is unusable because of NaNs is
    # pushed with 1 token. The servers can therefore distinguish the two reasons.
    usable = bool(merge.parts) or all(one.tokens == 0 for one in merge.without)
    tokens = tokens if usable else 1.0
    outer, message = client.push(state.outer, version=state.read, tokens=tokens, usable=usable)
    return replace(state, outer=outer, read=None), Forward(merge, message)


def _released(model: Consistency, state: RackState) -> RackStep:
    """Send the answers that were held back if workers may compute from the rack's copy.

    If workers may not compute yet, the rack pulls new parameters, unless a pull is pending
    already.
    """
    if not state.answers:
        return RackStep(state)
    if client.ready(model, state.outer):
        given, now = state.read, state.outer.version
        # If the answers of a round have several versions, `read` is the oldest of these versions.
        read = now if given is None or now is None else min(given, now)
        return RackStep(replace(state, answers=(), read=read), state.answers)
    if state.outer.pulling:
        return RackStep(state)
    outer, message = client.pull(state.outer)
    return RackStep(replace(state, outer=outer), (Ask(message),))
