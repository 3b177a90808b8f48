"""Secure aggregation of rounds of workers: a server sees the sum of pushes, but no single push."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.exchange import ServerLink
from jaxdist.param_server.live.masked import masked_spec, mean_of_sum
from jaxdist.param_server.live.reception import is_finite
from jaxdist.param_server.live.server import Server
from jaxdist.param_server.protocol import server as protocol
from jaxdist.param_server.protocol.messages import Acknowledge, Answer, Apply, Effect, Reply
from jaxdist.secure.masks import SecureError, encode
from jaxdist.secure.rounds import ClientRound, Parts, ServerRound, Stage, of_bytes, to_bytes
from jaxdist.wire.contract import NO_SEQUENCE, Envelope, Op, Peer, Spec
from jaxdist.wire.frames import spec_for

KEYS = "the keys of the other workers"


class SecureServer(Server):
    """A server whose clients mask their pushes; the server unmasks only the sum of a round.

    Args:
      clients: the number of clients for which the run is planned.
      needed: the number of clients that must complete a round.
      failed: the function that is called with the reason when a sum can never be unmasked.
      given, more: the arguments of the base class; the model is `bsp`.
    """

    def __init__(
        self, *given: Any, clients: int, needed: int, failed: Callable[[str], None], **more: Any
    ) -> None:
        self._begin_round = partial(ServerRound, clients=clients, needed=needed)
        self._failed, self._over = failed, False
        self._asking: dict[int, tuple[Peer, Envelope]] = {}
        self._joining: list[tuple[Peer, Envelope]] = []
        self._waits: deque[Effect] = deque()
        self._open: Apply | None = None
        super().__init__(*given, **more)
        self.round = self._begin_round(self.state.clocks.version)
        self._push_spec = masked_spec(self._spec)

    def spec(self, envelope: Envelope) -> Spec | None:
        if envelope.op is Op.SECURE:
            return spec_for(envelope, self._push_spec, self._spec)
        return super().spec(envelope)

    def leave(self, client: int) -> None:
        super().leave(client)
        with self._changed:
            self._asking.pop(client, None)
            self._advance()

    def _received(self, peer: Peer, envelope: Envelope, finite: bool) -> None:
        client = envelope.client
        if envelope.op is Op.HELLO and self.round.begun and client not in self._range.inboxes:
            # The clients of this round have already agreed on their masks, so the new client joins
            # with the next round.
            self._joining = [*((p, e) for p, e in self._joining if p is not peer), (peer, envelope)]
        elif envelope.op is Op.SECURE and self._clients.get(peer) == client:
            self._asked(peer, envelope)
        elif envelope.op is Op.PUSH and not self._masks(envelope):
            reason = f"client {client} has not shared its keys in this round"
            self._refuse(peer, envelope, reason)
        else:
            super()._received(peer, envelope, finite)
            self._advance()

    def _masks(self, envelope: Envelope) -> bool:
        """Return whether a push is masked in the current round, or has been delivered before."""
        inbox = self._range.inboxes.get(envelope.client)
        again = inbox is None or envelope.sequence < inbox.expected
        return again or self.round.accepts(envelope.client)

    def _asked(self, peer: Peer, envelope: Envelope) -> None:
        if envelope.clock != self.round.number or envelope.payload is None:
            return  # The round is over, and the push of the client has its reply.
        try:
            parts = of_bytes(envelope.sequence, envelope.payload.tobytes())
            self.round.take(envelope.client, Stage(envelope.sequence), parts)
        except SecureError as error:
            self._refuse(peer, replace(envelope, sequence=NO_SEQUENCE), str(error))
            return
        self._asking[envelope.client] = peer, envelope
        self._advance()

    def _advance(self) -> None:
        """Answer the requests of clients, and unmask the sum if enough shares are revealed."""
        if self._over:
            return
        try:
            pushed = {client for client, _ in self._payloads}
            self.round.advance(self.state.members, pushed)
            for client, (peer, asked) in [*self._asking.items()]:
                found = self.round.answer(client, Stage(asked.sequence))
                if found is not None:
                    del self._asking[client]
                    raw = np.frombuffer(to_bytes(found), np.uint8)
                    peer.say(replace(asked, op=Op.SECURED, payload=raw))
            if self._open is not None and self.round.complete:
                self._unmask(self._open)
        except SecureError as error:
            self._over = True
            self._failed(str(error))

    def _unmask(self, effect: Apply) -> None:
        arrivals = effect.merge.arrivals
        vectors = {a.client: self._payloads[a.client, a.sequence] for a in arrivals}
        total = self.round.total({one: raw.view(np.uint64) for one, raw in vectors.items()})
        mean = mean_of_sum(effect.merge, total).astype(self._spec.dtype)
        self.shard.merged = lambda merge, change_of: mean
        super()._apply(effect)
        self._open = None
        self._next_round()
        self._carry_on()

    def _next_round(self) -> None:
        self.round = self._begin_round(self.round.number + 1)
        self._asking = {}
        joining, self._joining = self._joining, []
        for peer, envelope in joining:
            self._hello(peer, envelope)

    def _done(self, found: protocol.Step) -> None:
        self.state = found.state
        self._waits.extend(found.effects)
        self._carry_on()

    def _carry_on(self) -> None:
        """Execute effects in order, and stop at a merge whose sum is still masked."""
        while self._waits and self._open is None:
            self._do(self._waits.popleft())
        if self._open is None:
            self._save()

    def _apply(self, effect: Apply) -> None:
        if effect.merge.parts:
            self._open = effect
            self.round.closed([one.client for one in effect.merge.arrivals])
        else:
            # The merge contains no changes, so the clients need not compute a sum.
            super()._apply(effect)
            self._next_round()


class MaskingClient(Client):
    """A worker's client of servers that aggregate securely.

    Args:
      clients: the number of clients for which the run is planned.
      needed: the number of clients that must complete a round.
      given, more: the arguments of the base class.
    """

    def __init__(self, *given: Any, clients: int, needed: int, **more: Any) -> None:
        self._clients, self._needed = clients, needed
        self._rounds: dict[int, ClientRound] = {}
        self._begun: dict[int, int] = {}
        super().__init__(*given, **more)

    def _push_to(
        self, at: int, change: np.ndarray, read: int | None, tokens: float, clock: int | None = None
    ) -> None:
        link = self._links[at]
        self._wait(lambda: self._rounds[link.server].ready, KEYS)
        super()._push_to(at, change, read, tokens, clock)
        self._ask(link, Stage.ARRIVED, {})

    def _written(self, at: int, change: np.ndarray, tokens: float) -> tuple[np.ndarray, bool]:
        finite = bool(np.isfinite(tokens)) and is_finite(change)
        if tokens == 0 or not finite:
            vector = np.zeros(change.size, np.uint64)
        else:
            vector = encode(change, self._clients, tokens)
        masked = self._rounds[self._links[at].server].masked(vector)
        return masked.view(np.uint8), finite or tokens == 0

    def _ask(self, link: ServerLink, stage: Stage, parts: Parts) -> None:
        raw = np.frombuffer(to_bytes(parts), np.uint8)
        clock = self._begun[link.server]
        link.ask(
            Envelope(
                Op.SECURE, link.state.epoch, self.number, stage, clock,
                tensor=link.server, payload=raw,
            )
        )  # fmt: skip

    def _secured(self, link: ServerLink, envelope: Envelope) -> None:
        asked = link.asked
        if asked is None or (asked.sequence, asked.clock) != (envelope.sequence, envelope.clock):
            # The client has received this answer before; the server has repeated the answer.
            return
        assert envelope.payload is not None
        link.asked = None
        try:
            parts = of_bytes(envelope.sequence, envelope.payload.tobytes())
            then = self._rounds[link.server].answered(Stage(envelope.sequence), parts)
        except SecureError as error:
            self._failed(str(error))
            return
        if then is not None:
            self._ask(link, *then)

    def _heard(self, link: ServerLink, reply: Reply, payload: np.ndarray | None) -> None:
        # The acknowledgement of a push ends its round, and with it the unanswered request of this
        # round. A request for the keys of the next round stays.
        settled = isinstance(reply, Acknowledge) and reply.sequence in link.payloads
        if settled and link.asked is not None and link.asked.sequence >= Stage.ARRIVED:
            link.asked = None
        super()._heard(link, reply, payload)
        if not isinstance(reply, Answer):
            return
        if self._read[0] is None:
            # The keys of a new client do not wait for the other servers, which may not admit the
            # new client before the other clients have pushed to this server.
            self._begin(link)
        elif all(one.state.admitted == one.state.clock for one in self._links):
            # A server that has the keys of a round admits no other client to this round. The keys
            # are therefore sent only after all servers have ended the previous round. If the keys
            # were sent earlier, a new client for which another server still waits in the previous
            # round would be deferred here, to a round that is never reached.
            for one in self._links:
                self._begin(one)

    def _begin(self, link: ServerLink) -> None:
        """Send the keys of the next round to a server, unless they are sent already."""
        clock = link.state.clock
        if self._begun.get(link.server) != clock:
            self._begun[link.server] = clock
            begun = self._rounds[link.server] = ClientRound(self.number, self._needed)
            self._ask(link, *begun.begin())
