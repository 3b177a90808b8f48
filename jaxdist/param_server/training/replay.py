"""A replay of a run from the recorded order of its servers' messages, with the same bits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from jaxdist.data.loader import DeviceBatch
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.contract import Arrival, Merge
from jaxdist.param_server.live.codes import PushEncoder
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.param_server.live.order import ProtocolCall, step
from jaxdist.param_server.live.shard import ServerShard, ShardState
from jaxdist.param_server.protocol.messages import Answer, Apply, Effect, Publish
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.received import (
    Key,
    received_directly,
    received_through_racks,
)
from jaxdist.param_server.training.state import Sharded
from jaxdist.param_server.training.worker import Flats, PushComputation

Applied = Callable[[int, Arrival], None]
"""A function that is called with a server and an arrival that the server has applied."""
BatchesOf = Callable[[int, int], Sequence[DeviceBatch]]
"""A function that returns the batches of a client's clock."""


class _NotYetError(Exception):
    """The error for a change from a version that another server has not reached yet."""


class Replay:
    """A replay of servers, racks and workers in one process, in the recorded order of messages.

    The workers' changes are recomputed from the recorded versions. The replay keeps a copy of the
    parameters in memory for each version from which a later change was computed.

    Args:
      start: the initial state of each server.
      states: the initial protocol state of each server.
      logs: the recorded messages of each server.
      work: a function that returns a new computation for a client.
      racks: the recorded messages of all racks, for each server, or () without racks.
      due: a clock at which the servers' shards are stored in `reached`, or None to store no shard.
    """

    def __init__(
        self,
        sharded: Sharded,
        start: Sequence[ShardState],
        states: Sequence[RangeState],
        logs: Sequence[Iterable[ProtocolCall]],
        work: Callable[[int], PushComputation],
        batches_of: BatchesOf,
        racks: Sequence[Sequence[Iterable[ProtocolCall]]] = (),
        due: int | None = None,
    ) -> None:
        self.sharded, self._work, self._batches_of = sharded, work, batches_of
        self._racked, taken = bool(sharded.cluster.racks), [list(log) for log in logs]
        if self._racked:
            self._received = [received_through_racks(sharded.cluster, one) for one in racks]
        else:
            self._received = [received_directly(log) for log in taken]
        self._works: dict[int, tuple[PushComputation, list[PushEncoder]]] = {}
        self._means: dict[tuple[int, int, int], np.ndarray] = {}
        self._encoders: dict[tuple[int, int], PushEncoder] = {}
        self._changes: dict[Key, Flats] = {}
        self._left: Counter[Key] = Counter()
        for found in self._received:
            for key, push in found.pushes.items():
                # A worker that joins pushes zeros without tokens to a server that is a round behind
                # the other servers. Not all servers get such a push, so it is not counted.
                if push.tokens or all(key in one.pushes for one in self._received):
                    self._left[key] += 1
        self._clocks: dict[int, deque[int]] = {}
        for client, clock in sorted(self._left):
            self._clocks.setdefault(client, deque()).append(clock)
        wanted = [
            Counter(one.versions[key] for key in self._left if key in one.versions)
            for one in self._received
        ]
        given = zip(sharded.layouts, start, states, taken, wanted, strict=True)
        self.servers = [_Server(sharded, *one, due) for one in given]

    def run(self) -> list[np.ndarray]:
        """Replay all messages, and return the parameters of each shard at the end.

        Raises:
          RunError: a change cannot be computed again, because its worker died before all servers
            had received the change; or the log ends before the clock `due`.
        """
        moved = True
        while moved:
            moved = False
            for server in self.servers:
                moved |= server.advance(self._change_of, self._applied)
        stuck = [str(s.layout.server) for s in self.servers if s.stuck]
        if stuck:
            raise RunError(
                f"servers {', '.join(stuck)} wait for changes that cannot be replayed: a worker "
                "died when only some servers had received its changes. Replay a run "
                "without such a death"
            )
        return [server.shard.params for server in self.servers]

    @property
    def reached(self) -> list[ShardState]:
        """The shard, at the clock `due`, of each server that has reached this clock."""
        return [server.reached for server in self.servers if server.reached is not None]

    def _change_of(self, server: int, one: Arrival) -> np.ndarray:
        """Return a server's part of a worker's change, or of the mean that a rack sent."""
        if not self._racked:
            return self._of_worker(server, one)
        rounds = self._received[server].rounds[one.client]
        # The earlier rounds of the rack are computed first, even rounds that were not applied,
        # since the rack's encoder carries state from one round to the next.
        while rounds and rounds[0][0] <= one.sequence:
            sequence, merge = rounds[0]
            if merge.parts:
                mean = self._mean(server, one.client, sequence, merge)
                self._means[server, one.client, sequence] = mean
            rounds.popleft()
        return self._means[server, one.client, one.sequence]

    def _mean(self, server: int, client: int, sequence: int, merge: Merge) -> np.ndarray:
        """Return the mean of a rack's round as the server received it."""
        found = combined(merge, partial(self._of_worker, server))
        for part in merge.parts:
            self._used(part.arrival)
        if not self.sharded.codes:
            return found
        codes = self.sharded.codes[server]
        encoder = self._encoders.setdefault((server, client), PushEncoder(codes, client))
        written, _ = encoder(found, sequence)
        return codes.decode(written, client, sequence)

    def _of_worker(self, server: int, one: Arrival) -> np.ndarray:
        key = one.client, one.clock
        # The earlier clocks of the client are computed first, even clocks whose changes were not
        # applied, since workers carry state from one clock to the next.
        clocks = self._clocks[one.client]
        while clocks and clocks[0] <= one.clock:
            self._changes[one.client, clocks[0]] = self._computed(one.client, clocks[0])
            clocks.popleft()
        return self._changes[key][server]

    def _applied(self, server: int, one: Arrival) -> None:
        if self._racked:
            del self._means[server, one.client, one.sequence]
        else:
            self._used(one)

    def _used(self, one: Arrival) -> None:
        """Delete a change when all servers that received a part of the change have used it."""
        key = one.client, one.clock
        self._left[key] -= 1
        if not self._left[key]:
            del self._changes[key]

    def _computed(self, client: int, clock: int) -> Flats:
        pushes = [found.pushes.get((client, clock)) for found in self._received]
        versions = [found.versions.get((client, clock), -1) for found in self._received]
        flats: Flats = []
        for server, version in zip(self.servers, versions, strict=True):
            found = server.versions.get(version)
            if found is None:
                raise _NotYetError
            flats.append(found)
        if client not in self._works:
            encoders = [PushEncoder(codes, client) for codes in self.sharded.codes]
            self._works[client] = self._work(client), encoders
        work, encoders = self._works[client]
        first = work.begin(flats)
        changes, _ = work.compute(self._batches_of(client, clock), clock)
        changes = changes if first is None else first
        for server, version in zip(self.servers, versions, strict=True):
            server.used(version)
        for at, (encoder, push) in enumerate(zip(encoders, pushes, strict=False)):
            # A worker sends zeros for a push without tokens, and does not use the encoder.
            if push is not None and push.tokens:
                written, _ = encoder(changes[at], push.stamp.sequence)
                changes[at] = encoder.codes.decode(written, client, push.stamp.sequence)
        return changes


class _Server:
    """A server of the replay.

    Attributes:
      versions: the parameters of versions that are still needed to recompute changes.
      waiting: the effects that are not executed yet.
      reached: the shard once it contains all changes from clocks before `due`, or None before.
    """

    def __init__(
        self,
        sharded: Sharded,
        layout: ShardLayout,
        start: ShardState,
        state: RangeState,
        log: Sequence[ProtocolCall],
        wanted: Counter[int],
        due: int | None,
    ) -> None:
        self.layout, self._model = layout, sharded.cluster.consistency
        transform = sharded.transform(layout)
        self.shard = ServerShard(layout, self._model, transform, start.params, start.optimizer)
        self.shard.merged = sharded.merged
        self._state, self._log, self._wanted = state, deque(log), wanted
        self.versions = {state.clocks.version: self.shard.params}
        self.waiting: deque[Effect] = deque()
        self._due = due
        self.reached: ShardState | None = None

    def used(self, version: int) -> None:
        """Record a use of a version, and delete the version after its last use."""
        self._wanted[version] -= 1
        if not self._wanted[version] and version < self._newest:
            del self.versions[version]

    @property
    def stuck(self) -> bool:
        """Whether the replay stopped before it reached the required state."""
        return bool(self.waiting) if self._due is None else self.reached is None

    @property
    def _newest(self) -> int:
        return max(self.versions)

    def advance(self, change_of: Callable[[int, Arrival], np.ndarray], applied: Applied) -> bool:
        """Execute the effects whose changes are known; return whether there was any such effect.

        Args:
          change_of: a function that returns this server's part of a change.
          applied: a function that is called with the server and each change that it has applied.
        """
        moved = False
        while self.waiting or self._log:
            while self.waiting:
                try:
                    self._do(self.waiting[0], change_of, applied)
                except _NotYetError:
                    return moved
                self.waiting.popleft()
                moved = True
            self._look()
            if self._log:
                taken = self._log.popleft()
                found = step(self._model, self._state, taken)
                self._state = found.state
                self.waiting.extend(found.effects)
                if taken.kind == "leave":
                    self.shard.forget(taken.client)
        self._look()
        return moved

    def _look(self) -> None:
        """Store the shard when it is due, as a server does after each message."""
        clocks, due = self._state.clocks, self._due
        if self.reached is None and due is not None and clocks.floor >= due:
            params, optimizer = self.shard.params, self.shard.kept()
            self.reached = ShardState(due, clocks.version, params, optimizer)

    def _do(
        self,
        effect: Effect,
        change_of: Callable[[int, Arrival], np.ndarray],
        applied: Applied,
    ) -> None:
        if isinstance(effect, Answer | Publish):
            # Delay compensation needs the version that each worker has read.
            self.shard.read(effect.client, effect.version)
        if not isinstance(effect, Apply):
            return
        at = self.layout.server
        changes = {
            (part.arrival.client, part.arrival.sequence): change_of(at, part.arrival)
            for part in effect.merge.parts
        }
        # Changes are deleted only now: if one change of a merge is not known yet, the merge begins
        # again later, and asks again for the changes that were known.
        for part in effect.merge.parts:
            applied(at, part.arrival)
        self.shard.apply(effect.merge, lambda one: changes[one.client, one.sequence])
        before, self.versions[effect.version] = self._newest, self.shard.params
        if not self._wanted[before]:
            self.versions.pop(before, None)
