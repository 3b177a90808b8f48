"""The server's side of the protocol for one range: a function from a message to effects.

    state, effects = receive(model, state, message, now)

Every function that changes the state returns a `Step`: the next state, and the effects in order.
The same calls in the same order have the same effects, so a log of the arguments of `receive`,
`join`, `leave` and `tick` replays to the same bits. Lost, repeated and reordered messages change
only the order in which the changes of different clients are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxdist.param_server.consistency.contract import Arrival, Clocks, Consistency, Merge, decide
from jaxdist.param_server.protocol.inbox import WINDOW, Inbox
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Apply,
    Drop,
    Effect,
    Message,
    Publish,
    Pull,
    Push,
    Refuse,
    Stamp,
)


@dataclass(frozen=True)
class RangeState:
    """The state of a range, without its arrays.

    Attributes:
      inboxes: the inboxes of members and of clients that have left, by client.
      reads: the waiting pulls, oldest first.
    """

    clocks: Clocks
    epoch: int = 0
    inboxes: Mapping[int, Inbox] = field(default_factory=dict)
    reads: tuple[Stamp, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.clocks.clocks)

    @property
    def late(self) -> tuple[int, ...]:
        """The members with the smallest clock, which hold up the waiting pulls."""
        clocks = self.clocks.clocks
        return tuple(sorted(one for one in clocks if clocks[one] == min(clocks.values())))


class Step(NamedTuple):
    """The state of a range after a call of the protocol, and the call's effects, in order."""

    state: RangeState
    effects: tuple[Effect, ...] = ()


def join(model: Consistency, state: RangeState, client: int, now: float = 0.0) -> Step:
    """Add a member, which must pull first; a client number that was ever used is refused."""
    if client in state.inboxes:
        reason = f"client {client} was a member before: use a number that was never used"
        return Step(state, (Refuse(client, 0, reason, state.epoch),))
    inboxes = {**state.inboxes, client: Inbox()}
    return _decided(model, replace(state, clocks=state.clocks.joined(client), inboxes=inboxes), now)


def leave(model: Consistency, state: RangeState, client: int, now: float = 0.0) -> Step:
    """Remove a member; its changes stay, and no client waits for the member any more."""
    if client not in state.clocks.clocks:
        return Step(state)
    reads = tuple(read for read in state.reads if read.client != client)
    return _decided(model, replace(state, clocks=state.clocks.left(client), reads=reads), now)


def range_in_epoch(state: RangeState, epoch: int) -> RangeState:
    """Return the range in a new epoch; the range refuses messages of older epochs.

    The range forgets the pulls that it has not answered. Clients send these pulls and all refused
    messages again. The range remembers delivered and settled messages, so that no message counts
    twice.
    """
    assert epoch > state.epoch, f"epoch {epoch} after {state.epoch}"
    return replace(state, epoch=epoch, reads=())


def advanced(model: Consistency, state: RangeState, clock: int) -> Step:
    """Advance a rack's range to the clock that the servers have reached.

    The members keep their clocks: the range drops their changes for the rounds that are over.
    """
    clocks = replace(state.clocks, version=clock, floor=clock)
    return _decided(model, replace(state, clocks=clocks), 0.0)


def tick(model: Consistency, state: RangeState, now: float) -> Step:
    """Apply the updates that are due at the time `now` without a message (see `wake`)."""
    return _decided(model, state, now)


def wake(model: Consistency, state: RangeState) -> float | None:
    """Return the time at which `tick` is to be called, in seconds, or None without such a time."""
    return model.wake(state.clocks)


def receive(model: Consistency, state: RangeState, message: Message, now: float = 0.0) -> Step:
    """Process a message of a worker.

    A message that was delivered before changes no parameters; the reply is repeated.
    """
    stamp = message.stamp
    reason = _misplaced(model, state, message)
    if reason is not None:
        return Step(state, (Refuse(stamp.client, stamp.sequence, reason, state.epoch),))
    inbox = state.inboxes[stamp.client]
    if stamp.sequence < inbox.expected:
        return _again(model, state, message, now)
    return _all_delivered(model, state, stamp.client, *inbox.put(message), now)


def resume(
    model: Consistency, state: RangeState, client: int, sequence: int, now: float = 0.0
) -> Step:
    """Continue with a member that has the final replies to all messages before `sequence`."""
    if client not in state.clocks.clocks:
        return Step(state)
    inbox = state.inboxes[client].settled_before(sequence)
    return _all_delivered(model, state, client, *inbox, now)


def _all_delivered(
    model: Consistency,
    state: RangeState,
    client: int,
    inbox: Inbox,
    ready: tuple[Message, ...],
    now: float,
) -> Step:
    if inbox is state.inboxes[client]:
        return Step(state)
    state = replace(state, inboxes={**state.inboxes, client: inbox})
    effects: list[Effect] = []
    for one in ready:
        state, more = _delivered(model, state, one, now)
        effects += more
    return Step(state, tuple(effects))


def _misplaced(model: Consistency, state: RangeState, message: Message) -> str | None:
    """Return the reason why a message is refused, or None if it is accepted."""
    epoch, client, sequence = (getattr(message.stamp, name) for name in Stamp.__annotations__)
    if epoch != state.epoch:
        return (
            f"epoch {epoch} differs from the epoch {state.epoch} of the range: request the current "
            "placement"
        )
    if client not in state.clocks.clocks:
        return f"client {client} is not a member: join first"
    if not state.inboxes[client].accepts(sequence) or sequence < 0:
        expected = state.inboxes[client].expected
        return f"message {sequence} is not within {WINDOW} of the next message, {expected}"
    return None


def _again(model: Consistency, state: RangeState, message: Message, now: float) -> Step:
    """Answer a retry with the earlier reply, unless that reply is still pending.

    A repeated pull is answered with the parameters that the client may read now. If the client has
    pushed since the first answer, the pull may wait again.
    """
    stamp = message.stamp
    if isinstance(message, Push):
        known = state.inboxes[stamp.client].outcomes.get(stamp.sequence)
        return Step(state, () if known is None else (known,))
    if stamp in state.reads:
        return Step(state)
    return _decided(model, replace(state, reads=(*state.reads, stamp)), now)


def _answer(model: Consistency, state: RangeState, stamp: Stamp) -> Answer:
    clocks = state.clocks
    clock = model.clock_of(clocks, stamp.client)
    return Answer(stamp.client, stamp.sequence, clock, clocks.version, clocks.floor)


def _delivered(model: Consistency, state: RangeState, message: Message, now: float) -> Step:
    if isinstance(message, Pull):
        return _decided(model, replace(state, reads=(*state.reads, message.stamp)), now)
    stamp, clocks = message.stamp, state.clocks
    arrival = Arrival(
        stamp.client,
        stamp.sequence,
        message.clock,
        message.version,
        message.tokens,
        message.usable,
        now,
    )
    impossible = _impossible(model, clocks, arrival)
    if impossible is not None:
        return _rejected(state, arrival, impossible)
    reason, after = model.refusal(clocks, arrival), clocks.arrived(arrival)
    if reason is None:
        return _decided(model, replace(state, clocks=after), now)
    # The clock advances although the change is dropped, so that no client waits for it.
    state = replace(state, clocks=replace(after, held=clocks.held))
    state, effects = _settled(state, arrival, None, reason)
    state, more = _decided(model, state, now)
    return Step(state, (*effects, *more))


def _rejected(state: RangeState, arrival: Arrival, reason: str) -> Step:
    """Drop a push permanently and refuse it; a retry is refused in the same way.

    The clock does not advance, so the client must stop. A client that continued would wait for ever
    for parameters of a clock that this range never reaches.
    """
    told = Refuse(arrival.client, arrival.sequence, reason, state.epoch)
    inbox = state.inboxes[arrival.client].settled(told)
    state = replace(state, inboxes={**state.inboxes, arrival.client: inbox})
    return Step(state, (Drop(arrival.client, arrival.sequence, reason), told))


def _impossible(model: Consistency, clocks: Clocks, arrival: Arrival) -> str | None:
    """Return why no correct worker can have sent this change, or None if a correct worker can."""
    if arrival.version > clocks.version:
        return (
            f"version {arrival.version} does not exist yet: the range has version {clocks.version}"
        )
    if not clocks.clocks[arrival.client] <= arrival.clock <= model.clock_of(clocks, arrival.client):
        return (
            f"clock {arrival.clock} is not the client's next clock, {clocks.clocks[arrival.client]}"
        )
    if not model.reachable(clocks, arrival):
        return (
            f"clock {arrival.clock} needs newer parameters than the client can have read (floor "
            f"{clocks.floor})"
        )
    # The comparison inside `not` is false for NaN, so that NaN tokens are refused too.
    if not 0 <= arrival.tokens < float("inf"):
        return f"{arrival.tokens} tokens are impossible: the weights of a batch add up to 0 or more"
    return None


def _decided(model: Consistency, state: RangeState, now: float) -> Step:
    readers = tuple(read.client for read in state.reads)
    before = state.clocks
    decision = decide(model, before, readers, now)
    state = replace(state, clocks=decision.clocks)
    effects: list[Effect] = []
    for number, merge in enumerate(decision.merges, before.version + 1):
        state, more = _merged(state, merge, number)
        effects += more
    answered = [read for read in state.reads if read.client in decision.admitted]
    effects += [_answer(model, state, read) for read in answered]
    state = replace(state, reads=tuple(read for read in state.reads if read not in answered))
    if model.publishes and decision.clocks.floor > before.floor:
        # A member that was just answered has the published parameters already.
        told = {read.client for read in answered}
        effects += [
            Publish(member, decision.clocks.version, decision.clocks.floor)
            for member in state.members
            if member not in told
        ]
    return Step(state, tuple(effects))


def _merged(state: RangeState, merge: Merge, version: int) -> Step:
    effects: list[Effect] = [Apply(merge, version)]
    for part in merge.parts:
        state, more = _settled(state, part.arrival, version)
        effects += more
    for arrival in merge.without:
        state, more = _settled(state, arrival, None, arrival.nothing or "")
        effects += more
    return Step(state, tuple(effects))


def _settled(state: RangeState, arrival: Arrival, version: int | None, reason: str = "") -> Step:
    told = Acknowledge(arrival.client, arrival.sequence, version)
    inbox = state.inboxes[arrival.client].settled(told)
    state = replace(state, inboxes={**state.inboxes, arrival.client: inbox})
    if version is not None:
        return Step(state, (told,))
    return Step(state, (Drop(arrival.client, arrival.sequence, reason), told))
