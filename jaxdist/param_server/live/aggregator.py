"""A rack's aggregator for one server: a server of its workers, and one client of that server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.contract import Arrival, Consistency
from jaxdist.param_server.live.codes import Codes, Encoder
from jaxdist.param_server.live.exchange import Exchange, Link
from jaxdist.param_server.live.layout import Layout
from jaxdist.param_server.live.reception import Reception
from jaxdist.param_server.protocol import client, rack
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Answer, Drop, Message, Refuse, Reply
from jaxdist.param_server.protocol.rack import Ask, Forward, RackStep
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.wire.contract import Wire


class Aggregator(Reception):
    """A `jaxdist.param_server.wire.contract.Service` for the workers of a rack.

    Once all of its workers are gone it leaves the server; the first that joins after them makes it
    a new client there.

    Args:
      model: of the servers; the workers of a rack keep `rack.WITHIN`.
      wire: to the server.
      numbers: as whom it speaks to the server, one after the other.
      workers: the first of the rack.
      codes: how pushes are written, its workers' and its own; None: as they are.
      retry_seconds: for an answer of the server, before a message is sent again.
      gone: called with its number at the server where its last worker has left.
      failed: called with what the server refused.

    Attributes:
      state: of the protocol.
      forwarded: pushes to the server so far.
    """

    def __init__(
        self,
        layout: Layout,
        model: Consistency,
        wire: Wire,
        numbers: Iterator[int],
        workers: tuple[int, ...],
        *,
        codes: Codes | None = None,
        retry_seconds: float = 30.0,
        gone: Callable[[int], None] = lambda number: None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__(layout.spec, codes)
        self.model, self.forwarded = model, 0
        self._numbers, self._workers, self._gone = numbers, len(workers), gone
        self._link = Link(layout.server, wire, ClientState(-1), f"server {layout.server}")
        self._begin()
        for worker in workers:
            self._join(worker)
        self._exchange = Exchange(
            [self._link],
            self._lock,
            retry_seconds=retry_seconds,
            heard=self._heard,
            failed=failed,
        )

    def _begin(self) -> None:
        """As a client that the server does not know yet."""
        number = next(self._numbers)
        self.state = rack.begin(number, self._workers)
        self._encoder = None if self._codes is None else Encoder(self._codes, number)

    @property
    def _range(self) -> RangeState:
        return self.state.inner

    def close(self) -> None:
        """End its session with the server; its workers' sessions are the wire's."""
        self._exchange.close()

    def stats(self) -> dict[str, int]:
        """What it counts, by name."""
        with self._changed:
            counters = self.counters
            return {
                "received_bytes": counters.received_bytes,
                "sent_bytes": counters.sent_bytes,
                "forwarded": self.forwarded,
                "dropped": sum(counters.dropped.values()),
                "refused": sum(counters.refused.values()),
            }

    def leave(self, worker: int) -> None:
        """A worker has gone for good: the rest of its rack does not wait for it any more."""
        with self._changed:
            if worker in self.state.inner.members:
                self._do(rack.leave(self.model, self.state, worker))
                if not self.state.inner.members:
                    self._leave_server()
            peer = self._dismissed(worker)
        if peer is not None:
            peer.close()

    def _leave_server(self) -> None:
        before = self._link.state.client
        self._payloads.clear()
        self._waiting.clear()
        self._begin()
        self._link.idle = True
        self._exchange.begin(self._link, self.state.outer)
        self._gone(before)

    def _join(self, client: int) -> None:
        self._do(rack.join(self.model, self.state, client))
        if self._link.idle:
            self._link.idle = False
            self._exchange.wake()

    def _message(self, message: Message) -> None:
        self._do(rack.from_worker(self.model, self.state, message, self.seconds))

    def _late(self) -> str:
        if self.state.answers or self.state.owed:
            return self._link.name
        return f"clients {', '.join(map(str, self.state.inner.late)) or 'none'}"

    def _heard(self, link: Link, reply: Reply, payload: np.ndarray | None) -> None:
        step = rack.from_root(self.model, self.state, reply)
        if step.takes:
            link.copy = payload
        self._do(step)
        known = self.state.outer.under_way
        link.payloads = {at: one for at, one in link.payloads.items() if at in known}

    def _do(self, step: RackStep) -> None:
        """What the protocol says, in its order."""
        self.state, self._link.state = step.state, step.state.outer
        for effect in step.effects:
            match effect:
                case Forward():
                    self._forward(effect)
                case Ask():
                    self._link.send(effect.message)
                case Drop():
                    self.counters.count(self.counters.dropped, effect.reason)
                    self._release(effect.client, effect.sequence)
                case _:
                    self._tell(effect)

    def _tell(self, reply: Reply) -> None:
        if isinstance(reply, Refuse):
            self._release(reply.client, reply.sequence)
        self._reply(reply, self._link.copy if isinstance(reply, Answer) else None)

    def _forward(self, effect: Forward) -> None:
        sequence = effect.message.stamp.sequence
        self._link.payloads[sequence] = self._written(effect, sequence)
        for arrival in effect.merge.arrivals:
            self._release(arrival.client, arrival.sequence)
        self.forwarded += 1
        self._link.send(self.state.outer.under_way[sequence])

    def _written(self, effect: Forward, sequence: int) -> np.ndarray:
        """The mean as it is sent; zeros where nothing of the round is usable."""

        def payload_of(one: Arrival) -> np.ndarray:
            return self._payloads[one.client, one.sequence]

        if not effect.merge.parts:
            return np.zeros(self._push_spec.length, self._push_spec.dtype)
        total = combined(effect.merge, payload_of)
        if self._encoder is None:
            return total
        written, finite = self._encoder(total, sequence)
        if not finite:
            outer = client.spoiled(self.state.outer, sequence)
            self.state = replace(self.state, outer=outer)
            self._link.state = outer
        return written
