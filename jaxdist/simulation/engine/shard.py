"""A server's arrays in a simulation, and the record of its changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from jaxdist.param_server.consistency.contract import Clocks, Consistency
from jaxdist.param_server.contract import RuleState
from jaxdist.param_server.live.layout import ShardLayout, split_pieces
from jaxdist.param_server.live.shard import ShardArrays
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
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.simulation.engine.problem import UpdateRule


class SimulatedShard(ShardArrays):
    """The parameters of a simulated server, where an `UpdateRule` updates each range."""

    def __init__(
        self, layout: ShardLayout, model: Consistency, rule: UpdateRule, flat: np.ndarray
    ) -> None:
        super().__init__(layout, model, flat)
        self._rule = rule
        self._states: list[RuleState] = [
            rule.init(piece.range.name, part) for piece, part in split_pieces(layout, flat)
        ]

    def _stepped(self, gradient: np.ndarray, rate: float) -> np.ndarray:
        flat = np.empty_like(self.params)
        both = zip(
            *(split_pieces(self.layout, one) for one in (self.params, gradient)), strict=True
        )
        for at, ((piece, array), (_, change)) in enumerate(both):
            given = (array, change, rate, self._states[at])
            new, self._states[at] = self._rule.update(piece.range.name, *given)
            flat[piece.slice] = new.reshape(-1)
        return flat


class ShardNode:
    """A server, with the protocol's state, the arrays, and the waiting payloads.

    A single message carries all ranges of the server, and a single clock counts their changes.

    Attributes:
      dropped: the number of dropped changes by reason.
      floors: for each version, a clock such that the version contains the changes of all members
        from all earlier clocks. The clock comes from a count of applied changes, and not from the
        protocol under test.
    """

    def __init__(
        self,
        arrays: SimulatedShard,
        workers: int,
        send: Callable[[int, Reply, np.ndarray | None], None],
    ) -> None:
        self.arrays, self.layout, self.model = arrays, arrays.layout, arrays.model
        self.number = arrays.layout.server
        self.state = RangeState(Clocks(workers))
        self.dropped: Counter[str] = Counter()
        self.floors = {0: 0}
        self._send = send
        self._payloads: dict[tuple[int, int], np.ndarray] = {}
        self._applied: dict[int, int] = {}
        self.merged = 0

    def join(self, client: int, now: float) -> None:
        self._applied[client] = self.floors[self.state.clocks.version]
        self.do(server.join(self.model, self.state, client, now))

    def leave(self, client: int, now: float) -> None:
        self.do(server.leave(self.model, self.state, client, now))

    def tick(self, now: float) -> None:
        self.do(server.tick(self.model, self.state, now))

    def receive(self, message: Message, payload: np.ndarray | None, now: float) -> None:
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
        self.floors[version] = max(known, self.floors[version])

    def _reply(self, reply: Reply) -> None:
        carries = isinstance(reply, Answer | Publish)
        payload = self.arrays.read(reply.client, reply.version) if carries else None
        self._send(self.number, reply, payload)

    def _apply(self, effect: Apply) -> None:
        merge = effect.merge
        self.merged += len(merge.parts)
        self.arrays.apply(merge, lambda one: self._payloads[one.client, one.sequence])
        for arrival in merge.arrivals:
            self._payloads.pop((arrival.client, arrival.sequence))
            self._applied[arrival.client] = arrival.clock + 1
        self.floors[effect.version] = self.floors[effect.version - 1]
        self._refresh(effect.version)

    def _drop(self, effect: Drop) -> None:
        self.dropped[effect.reason] += 1
        if self._payloads.pop((effect.client, effect.sequence), None) is not None:
            # A dropped change counts as applied, so that floors do not wait for it.
            self._applied[effect.client] += 1
