"""A server: a shard behind a lock, driven by the protocol and reached over a wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.codes import Codes
from jaxdist.param_server.live.order import OrderLog, ProtocolCall, is_recorded, step
from jaxdist.param_server.live.reception import Reception
from jaxdist.param_server.live.shard import ServerShard, ShardState
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import Answer, Apply, Drop, Effect, Publish
from jaxdist.param_server.protocol.server import RangeState


class Server(Reception):
    """A `jaxdist.wire.contract.Service` for the clients of one shard.

    Args:
      state: the state of the protocol, with the initial workers as members.
      codes: the encoding of pushes, or None for uncompressed pushes.
      due: the clocks at which `reached` is called, ascending.
      reached: the function that is called with the shard at each clock in `due`.
      applied: the function that is called after each update with its version and the squared norm
        of its change.
      log: the log of the order of messages, or None without a log.
    """

    def __init__(
        self,
        shard: ServerShard,
        model: Consistency,
        state: RangeState,
        *,
        codes: Codes | None = None,
        due: Sequence[int] = (),
        reached: Callable[[ShardState], None] = lambda reached: None,
        applied: Callable[[int, float], None] = lambda version, square: None,
        log: OrderLog | None = None,
    ) -> None:
        super().__init__(shard.layout.spec, codes)
        self.shard, self.model, self.state = shard, model, state
        self._due, self._reached, self._applied, self._log = list(due), reached, applied, log
        self._closed = False
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    @property
    def _range(self) -> RangeState:
        return self.state

    def close(self) -> None:
        """Stop the server's thread and close its log; the wire ends the sessions."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ticker.join()
        if self._log is not None:
            self._log.close()

    def join(self, client: int) -> None:
        """Add a client as a member before the client has a session."""
        with self._changed:
            self._join(client)

    def add_due(self, clock: int) -> None:
        """Add a clock at which `reached` is called, and remove all later clocks from `due`."""
        with self._changed:
            self._due = sorted({due for due in self._due if due < clock} | {clock})

    def stats(self) -> dict[str, float]:
        """Return the server's counters by name."""
        with self._changed:
            staleness = self.shard.staleness
            count = sum(staleness.values())
            total = sum(value * number for value, number in staleness.items())
            return {
                "floor": self.state.clocks.floor,
                "staleness_mean": total / count if count else 0.0,
                "staleness_max": max(staleness, default=0),
                "queue": len(self._payloads),
                "idle_share": 1 - self.counters.busy_seconds / max(self.seconds, 1e-9),
                "applied": self.counters.applied,
                **super().stats(),
            }

    def leave(self, client: int) -> None:
        """Remove a worker permanently, so that no client waits for it any more."""
        with self._changed:
            self._take(ProtocolCall("leave", self.seconds, client))
            self.shard.forget(client)
            peer = self._dismissed(client)
        if peer is not None:
            peer.close()

    def _take(self, taken: ProtocolCall) -> None:
        """Execute a call of the protocol and its effects, in order."""
        found = step(self.model, self.state, taken)
        if self._log is not None and is_recorded(self.state, found):
            self._log.add(taken)
        self._done(found)

    def _done(self, found: protocol.Step) -> None:
        """Execute the effects of a step of the protocol, in order."""
        self.state = found.state
        for effect in found.effects:
            self._do(effect)
        self._save()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Apply):
            self._apply(effect)
        elif isinstance(effect, Drop):
            self.counters.count(self.counters.dropped, effect.reason)
            self._release(effect.client, effect.sequence)
        else:
            carries = isinstance(effect, Answer | Publish)
            read = self.shard.read(effect.client, effect.version) if carries else None
            self._reply(effect, read)

    def _save(self) -> None:
        """Send the shard's contents to be saved, for each due save whose clock has come."""
        while self._due and self.state.clocks.floor >= self._due[0]:
            clocks, shard = self.state.clocks, self.shard
            floor = self._due.pop(0)
            self._reached(ShardState(floor, clocks.version, shard.params, shard.kept()))
            # A replay up to this clock needs the log, so the log is flushed before the server may
            # be killed.
            if self._log is not None:
                self._log.flush()

    def _apply(self, effect: Apply) -> None:
        self.shard.apply(effect.merge, self._payload_of)
        self.counters.applied += len(effect.merge.parts)
        for arrival in effect.merge.arrivals:
            self._release(arrival.client, arrival.sequence)
        self._applied(effect.version, self.shard.square if effect.merge.parts else 0.0)

    def _tick(self) -> None:
        """Call the protocol whenever an update becomes due without a message (`wake`)."""
        with self._changed:
            while not self._closed:
                wake = protocol.wake(self.model, self.state)
                now = self.seconds
                if wake is not None and wake <= now:
                    self._take(ProtocolCall("tick", now))
                    if protocol.wake(self.model, self.state) == wake:
                        # The tick changed nothing. This wait keeps the loop from being busy.
                        self._changed.wait(0.01)
                    continue
                self._changed.wait(None if wake is None else wake - now)
