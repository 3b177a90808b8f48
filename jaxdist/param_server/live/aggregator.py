"""A rack's aggregator for one server: a server to its workers and a client of that server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.codes import Codes, PushEncoder
from jaxdist.param_server.live.exchange import ServerLink, Sessions
from jaxdist.param_server.live.layout import ShardLayout
from jaxdist.param_server.live.order import OrderLog, ProtocolCall, rack_step
from jaxdist.param_server.live.reception import Reception
from jaxdist.param_server.protocol import client, rack
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Answer, Drop, Refuse, Reply
from jaxdist.param_server.protocol.rack import Ask, Forward, RackStep
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.wire.contract import Wire


class Aggregator(Reception):
    """A `jaxdist.wire.contract.Service` for the workers of a rack.

    When all workers of the rack have left, the aggregator leaves the server. With the next worker
    that joins, the aggregator becomes a new client of the server.

    Args:
      model: the consistency model of the servers; workers of a rack always follow `rack.WITHIN`.
      wire: the connection to the server.
      numbers: the client numbers at the server, which the aggregator uses one after another.
      workers: the initial workers of the rack.
      codes: the encoding of the pushes of workers and aggregator, or None for uncompressed pushes.
      retry_seconds: the seconds without an answer of the server after which a message is sent
        again.
      gone: the function that is called with the aggregator's client number when the last worker has
        left.
      log: the log of the order of messages, or None without a log.
      failed: the function that is called with the reason when the server refuses a message.

    Attributes:
      state: the state of the protocol.
      forwarded: the number of pushes to the server so far.
    """

    def __init__(
        self,
        layout: ShardLayout,
        model: Consistency,
        wire: Wire,
        numbers: Iterator[int],
        workers: tuple[int, ...],
        *,
        codes: Codes | None = None,
        retry_seconds: float = 30.0,
        gone: Callable[[int], None] = lambda number: None,
        log: OrderLog | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__(layout.spec, codes)
        self.model, self.forwarded = model, 0
        self._numbers, self._workers, self._gone = numbers, len(workers), gone
        self._log = log
        self._given: dict[int, tuple[int, int, np.ndarray | None]] = {}
        self._link = ServerLink(layout.server, wire, ClientState(-1), f"server {layout.server}")
        self._begin()
        for worker in workers:
            super()._join(worker)
        self._exchange = Sessions(
            [self._link],
            self._lock,
            retry_seconds=retry_seconds,
            heard=self._heard,
            failed=failed,
        )

    def _begin(self) -> None:
        """Reset the protocol's state to the state of a new client of the server."""
        number = next(self._numbers)
        self.state = rack.begin_rack(number, self._workers)
        self._encoder = None if self._codes is None else PushEncoder(self._codes, number)

    @property
    def _range(self) -> RangeState:
        return self.state.inner

    def close(self) -> None:
        """End the session with the server and close the log; the wire ends all worker sessions."""
        self._exchange.close()
        if self._log is not None:
            self._log.close()

    def stats(self) -> dict[str, float]:
        """Return the aggregator's counters by name."""
        return {**super().stats(), "forwarded": self.forwarded}

    def leave(self, worker: int) -> None:
        """Remove a worker permanently, so that the rest of the rack no longer waits for it."""
        with self._changed:
            if worker in self.state.inner.members:
                self._take(ProtocolCall("leave", self.seconds, worker))
                self._given.pop(worker, None)
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
        self._exchange.begin(self._link, self.state.outer)
        self._gone(before)

    def _join(self, client: int) -> None:
        super()._join(client)
        if self._link.kept is None:
            self._exchange.open(self._link)

    def _late(self) -> str:
        if self.state.answers or self.state.owed:
            return self._link.name
        return super()._late()

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        self._take(ProtocolCall("hear", self.seconds, reply=reply), payload)
        known = self.state.outer.under_way
        link.payloads = {at: one for at, one in link.payloads.items() if at in known}

    def _take(self, taken: ProtocolCall, payload: np.ndarray | None = None) -> None:
        """Execute a call of the protocol and its effects, in order.

        Args:
          taken: the call.
          payload: the parameters of a server's reply, or None without parameters.
        """
        found = rack_step(self.model, self.state, taken)
        # A call that leaves the state unchanged only repeats earlier replies, which a replay does
        # not need.
        if self._log is not None and found.state != self.state:
            self._log.add(taken)
            # The servers may save a state that contains this round. A replay of that state needs
            # this entry of the log, even if this process is killed now.
            self._log.flush()
        if found.takes:
            self._link.copy = payload
        self._do(found)

    def _do(self, step: RackStep) -> None:
        """Execute the effects of a protocol step, in order."""
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
        self._reply(reply, self._copy_for(reply) if isinstance(reply, Answer) else None)

    def _copy_for(self, answer: Answer) -> np.ndarray | None:
        """Return the parameters for an answer, or None before the rack has a copy.

        A repeated answer has the parameters of the first answer. With other parameters, a replay
        could not know from which of two copies the worker computed.
        """
        given = self._given.get(answer.client)
        if given is None or given[:2] < (answer.sequence, answer.clock):
            given = answer.sequence, answer.clock, self._link.copy
            self._given[answer.client] = given
        return given[2]

    def _forward(self, effect: Forward) -> None:
        sequence = effect.message.stamp.sequence
        self._link.payloads[sequence] = self._written(effect, sequence)
        for arrival in effect.merge.arrivals:
            self._release(arrival.client, arrival.sequence)
        self.forwarded += 1
        # The message is read from the state again: `_written` may have marked the push as unusable,
        # and `effect.message` lacks that mark.
        self._link.send(self.state.outer.under_way[sequence])

    def _written(self, effect: Forward, sequence: int) -> np.ndarray:
        """Return a round's mean, encoded for the server, or zeros if no change is usable.

        If the mean is not finite, the method also marks the push as unusable.
        """
        if not effect.merge.parts:
            return np.zeros(self._push_spec.length, self._push_spec.dtype)
        total = combined(effect.merge, self._payload_of)
        if self._encoder is None:
            return total
        written, finite = self._encoder(total, sequence)
        if not finite:
            outer = client.marked_unusable(self.state.outer, sequence)
            self.state = replace(self.state, outer=outer)
            self._link.state = outer
        return written
