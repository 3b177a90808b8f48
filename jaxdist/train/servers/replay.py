"""A run again, from the order that its servers took messages in: to the same bits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxdist.data.loader import DeviceBatch
from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Arrival
from jaxdist.param_server.live.layout import Layout
from jaxdist.param_server.live.order import Taken, step
from jaxdist.param_server.live.shard import Shard
from jaxdist.param_server.protocol.messages import Answer, Apply, Effect, Publish, Push
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.train.servers.state import Sharded, ShardState
from jaxdist.train.servers.worker import Computation, Flats

Key = tuple[int, int]
"""A client and a clock of it: one change, a part of which went to each server."""
BatchesOf = Callable[[int, int], Sequence[DeviceBatch]]
"""The batches of a client's clock."""


class _NotYetError(Exception):
    """A change was computed from a version that another server has not come to yet."""


class Replay:
    """Servers and workers without processes, in the order that was written down.

    What workers computed is computed again, from the versions that they said. It needs the memory
    of those versions at a time that are still to be computed from.

    Args:
      start: of each server.
      states: of the protocol, as servers began.
      logs: of each server.
      work: a new computation for a client.
    """

    def __init__(
        self,
        sharded: Sharded,
        start: Sequence[ShardState],
        states: Sequence[RangeState],
        logs: Sequence[Iterable[Taken]],
        work: Callable[[int], Computation],
        batches_of: BatchesOf,
    ) -> None:
        self.sharded, self._work, self._batches_of = sharded, work, batches_of
        taken = [list(log) for log in logs]
        self._versions = [_versions(log) for log in taken]
        self._works: dict[int, Computation] = {}
        self._changes: dict[Key, Flats] = {}
        self._left: Counter[Key] = Counter()
        for versions in self._versions:
            self._left.update(versions.keys())
        given = zip(sharded.layouts, start, states, taken, self._versions, strict=True)
        self.servers = [_Server(sharded, *one) for one in given]

    def run(self) -> list[np.ndarray]:
        """The parameters of each shard at the end.

        Raises:
          RunError: a change was computed from versions that no log has: its worker died while it
            was on its way, to some servers only.
        """
        moved = True
        while moved:
            moved = False
            for server in self.servers:
                moved |= server.advance(self._change_of)
        stuck = [str(s.layout.server) for s in self.servers if s.waiting]
        if stuck:
            raise RunError(
                f"servers {', '.join(stuck)} wait for changes that cannot be computed again: their "
                "worker died while they were on their way, to some servers only"
            )
        return [server.shard.params for server in self.servers]

    def _change_of(self, server: int, one: Arrival) -> np.ndarray:
        key = one.client, one.clock
        if key not in self._changes:
            self._changes[key] = self._computed(*key)
        change = self._changes[key][server]
        self._left[key] -= 1
        if not self._left[key]:
            del self._changes[key]
        return change

    def _computed(self, client: int, clock: int) -> Flats:
        flats: Flats = []
        for server, versions in zip(self.servers, self._versions, strict=True):
            found = server.versions.get(versions.get((client, clock), -1))
            if found is None:
                raise _NotYetError
            flats.append(found)
        work = self._works.setdefault(client, self._work(client))
        first = work.begin(flats)
        changes, _ = work.compute(self._batches_of(client, clock), clock)
        for server, versions in zip(self.servers, self._versions, strict=True):
            server.used(versions[client, clock])
        return changes if first is None else first


class _Server:
    """One server again.

    Attributes:
      versions: parameters that changes were computed from which are not computed again yet.
      waiting: effects that are to come.
    """

    def __init__(
        self,
        sharded: Sharded,
        layout: Layout,
        start: ShardState,
        state: RangeState,
        log: Sequence[Taken],
        versions: Mapping[Key, int],
    ) -> None:
        self.layout, self._model = layout, sharded.cluster.consistency
        transform = sharded.transform(layout)
        self.shard = Shard(layout, self._model, transform, start.params, start.optimizer)
        self._state, self._log = state, deque(log)
        self._wanted = Counter(versions.values())
        self.versions = {state.clocks.version: self.shard.params}
        self.waiting: deque[Effect] = deque()

    def used(self, version: int) -> None:
        """One change less is to be computed from a version."""
        self._wanted[version] -= 1
        if not self._wanted[version] and version < self._newest:
            del self.versions[version]

    @property
    def _newest(self) -> int:
        return max(self.versions)

    def advance(self, change_of: Callable[[int, Arrival], np.ndarray]) -> bool:
        """As far as what is known goes; whether that was anywhere."""
        moved = False
        while self.waiting or self._log:
            while self.waiting:
                try:
                    self._do(self.waiting[0], change_of)
                except _NotYetError:
                    return moved
                self.waiting.popleft()
                moved = True
            if self._log:
                taken = self._log.popleft()
                found = step(self._model, self._state, taken)
                self._state = found.state
                self.waiting.extend(found.effects)
                if taken.kind == "leave":
                    self.shard.forget(taken.client)
        return moved

    def _do(self, effect: Effect, change_of: Callable[[int, Arrival], np.ndarray]) -> None:
        if isinstance(effect, Answer | Publish):
            self.shard.read(effect.client, effect.version)
        if not isinstance(effect, Apply):
            return
        at = self.layout.server
        changes = {
            (part.arrival.client, part.arrival.sequence): change_of(at, part.arrival)
            for part in effect.merge.parts
        }
        self.shard.apply(effect.merge, lambda one: changes[one.client, one.sequence])
        before, self.versions[effect.version] = self._newest, self.shard.params
        if not self._wanted[before]:
            self.versions.pop(before, None)


def _versions(log: Iterable[Taken]) -> dict[Key, int]:
    """The version that each change was computed from."""
    pushes = (taken.message for taken in log if isinstance(taken.message, Push))
    return {(push.stamp.client, push.clock): push.version for push in pushes}
