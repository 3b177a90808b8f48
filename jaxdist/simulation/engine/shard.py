"""A server's arrays in a simulation, and the record of its changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.param_server.consistency.arrays import combined, delay_compensated
from jaxdist.param_server.consistency.arrival import DelayCompensation, OnArrival
from jaxdist.param_server.consistency.contract import Arrival, Consistency, Merge
from jaxdist.param_server.contract import Arrays, RuleState
from jaxdist.param_server.placement.ranges import Range
from jaxdist.param_server.protocol import server
from jaxdist.param_server.protocol.messages import (
    Answer,
    Apply,
    Drop,
    Message,
    Publish,
    Push,
    Reply,
)
from jaxdist.simulation.engine.problem import UpdateRule

Shard = tuple[np.ndarray, ...]
"""The arrays of a server's ranges, in the order of the ranges."""


def slices(ranges: Sequence[Range], arrays: Arrays) -> Shard:
    """Return a server's ranges of parameters or gradients; a scalar is a range of one row."""
    return tuple(np.atleast_1d(arrays[one.name])[one.start : one.stop] for one in ranges)


@dataclass
class Served:
    """The record of the changes that a server applied or dropped.

    Attributes:
      staleness: the number of changes for each staleness.
      dropped: the number of dropped changes by reason.
      floors: for each version, a clock such that the version contains the changes of all members
        from all earlier clocks. The clock comes from a count of applied changes, and not from the
        protocol under test.
    """

    staleness: Counter[int]
    dropped: Counter[str]
    floors: dict[int, int]


class ShardNode:
    """A server, with the protocol's state, the arrays, and the waiting payloads.

    A single message carries all ranges of the server, and a single clock counts their changes.
    """

    def __init__(
        self,
        number: int,
        ranges: Sequence[Range],
        start: Arrays,
        model: Consistency,
        rule: UpdateRule,
        workers: int,
        send: Callable[[int, Reply, Shard | None], None],
    ) -> None:
        self.number, self.ranges, self.model, self.rule = number, ranges, model, rule
        self.arrays = slices(ranges, start)
        self.size_bytes = sum(array.nbytes for array in self.arrays)
        self.rules: list[RuleState] = [
            rule.init(one.name, array) for one, array in zip(ranges, self.arrays, strict=True)
        ]
        self.state = server.begin(workers)
        self.book = Served(Counter(), Counter(), {0: 0})
        self._send = send
        self._payloads: dict[tuple[int, int], Shard] = {}
        self._read: dict[tuple[int, int], Shard] = {}
        self._squares: Shard = tuple(np.zeros_like(array) for array in self.arrays)
        self._applied: dict[int, int] = {}
        self.merged = 0

    def join(self, client: int, now: float) -> None:
        self._applied[client] = self.book.floors[self.state.clocks.version]
        self.do(server.join(self.model, self.state, client, now))

    def leave(self, client: int, now: float) -> None:
        self.do(server.leave(self.model, self.state, client, now))

    def tick(self, now: float) -> None:
        self.do(server.tick(self.model, self.state, now))

    def receive(self, message: Message, payload: Shard | None, now: float) -> None:
        if isinstance(message, Push):
            assert payload is not None
            key = message.stamp.client, message.stamp.sequence
            inbox = self.state.inboxes.get(key[0])
            # A copy of a delivered message has no effect, so the copy's payload would never be
            # freed.
            if inbox is not None and message.stamp.sequence >= inbox.expected:
                self._payloads[key] = payload
        self.do(server.receive(self.model, self.state, message, now))

    def do(self, step: server.Step) -> None:
        """Carry out the effects of a step of the protocol, in order."""
        self.state = step.state
        for effect in step.effects:
            if isinstance(effect, Apply):
                self._apply(effect)
            elif isinstance(effect, Drop):
                self._drop(effect)
            else:
                self._reply(effect)
        self._refresh(self.state.clocks.version)

    def _refresh(self, version: int) -> None:
        """Raise a version's floor to the smallest number of changes applied from any member."""
        members = self.state.members
        known = min((self._applied[client] for client in members), default=0)
        self.book.floors[version] = max(known, self.book.floors[version])

    def _reply(self, reply: Reply) -> None:
        carries = isinstance(reply, Answer | Publish)
        if carries and self._compensation is not None:
            # A reference is enough, because updates make new arrays.
            self._read[reply.client, reply.version] = self.arrays
        self._send(self.number, reply, self.arrays if carries else None)

    @property
    def _compensation(self) -> DelayCompensation | None:
        return self.model.delay_compensation if isinstance(self.model, OnArrival) else None

    def _apply(self, effect: Apply) -> None:
        merge = effect.merge
        self.merged += len(merge.parts)
        for part in merge.parts:
            self.book.staleness[part.staleness] += 1
        if merge.parts:
            self._update(merge)
        for arrival in merge.arrivals:
            self._payloads.pop((arrival.client, arrival.sequence))
            self._applied[arrival.client] = arrival.clock + 1
        self.book.floors[effect.version] = self.book.floors[effect.version - 1]
        self._refresh(effect.version)

    def _drop(self, effect: Drop) -> None:
        self.book.dropped[effect.reason] += 1
        if self._payloads.pop((effect.client, effect.sequence), None) is not None:
            # A dropped change counts as applied, so that floors do not wait for it.
            self._applied[effect.client] += 1

    def _update(self, merge: Merge) -> None:
        compensated = self._compensate(merge)
        arrays: list[np.ndarray] = []
        for at, array in enumerate(self.arrays):
            change = combined(merge, lambda one, at=at: compensated(one)[at])
            if self.model.payload == "elastic":
                arrays.append(array + change)
                continue
            # An outer change points downhill and the rule subtracts a gradient, so the change is
            # negated.
            gradient = -change if self.model.payload == "outer" else change
            given = (array, gradient, merge.rate, self.rules[at])
            new, self.rules[at] = self.rule.update(self.ranges[at].name, *given)
            arrays.append(new)
        self.arrays = tuple(arrays)

    def _compensate(self, merge: Merge) -> Callable[[Arrival], Shard]:
        config = self._compensation
        if config is None:
            return lambda one: self._payloads[one.client, one.sequence]
        (part,) = merge.parts
        one = part.arrival
        then, given = self._read[one.client, one.version], self._payloads[one.client, one.sequence]
        pairs = [
            delay_compensated(config, *four)
            for four in zip(given, self.arrays, then, self._squares, strict=True)
        ]
        self._squares = tuple(square for _, square in pairs if square is not None)
        old = [key for key in self._read if key[0] == one.client and key[1] < one.version]
        for key in old:
            del self._read[key]
        found = tuple(gradient for gradient, _ in pairs)
        return lambda _: found
