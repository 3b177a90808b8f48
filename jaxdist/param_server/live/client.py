"""A worker's side of all servers: parameters in, changes out, while it computes something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.live.codes import Codes, Encoder
from jaxdist.param_server.live.layout import Layout
from jaxdist.param_server.live.server import NO_SEQUENCE
from jaxdist.param_server.protocol import client as protocol
from jaxdist.param_server.protocol.client import ClientState
from jaxdist.param_server.protocol.messages import Message
from jaxdist.param_server.wire.contract import Envelope, Op, Session, Wire, WireError
from jaxdist.param_server.wire.messages import of_message, to_reply

AWAY_SECONDS = 0.05
"""Between two attempts to reach a server."""


@dataclass(frozen=True)
class Patience:
    """How long a worker waits.

    Attributes:
      deadline_seconds: for anything; then it gives up, and says who is late.
      retry_seconds: for an answer, before it sends a message again. A stream loses nothing while it
        lasts; what was under way when it ended is sent again at once.
    """

    deadline_seconds: float = 600.0
    retry_seconds: float = 30.0


class _Link:
    """What a worker knows of one server."""

    def __init__(self, layout: Layout, wire: Wire, state: ClientState) -> None:
        self.layout, self.wire, self.state = layout, wire, state
        self.copy: np.ndarray | None = None
        self.read: int | None = None
        self.payloads: dict[int, np.ndarray] = {}
        self.asked: dict[int, float] = {}
        self.session: Session | None = None
        self.welcome = False
        self.greeted = 0.0
        self.late = ""


class Client:
    """One worker's sessions with all servers. A context manager; all methods are its owner's.

    Args:
      number: of the client.
      wires: to the servers, in the order of their layouts.
      codes: how pushes to each server are written; () sends them as they are.

    Attributes:
      waited_seconds: spent in `read`, `push` and `drain`.
      received_bytes, sent_bytes: of payloads.
    """

    def __init__(
        self,
        number: int,
        model: Consistency,
        layouts: Sequence[Layout],
        wires: Sequence[Wire],
        *,
        codes: Sequence[Codes] = (),
        epoch: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self.number, self.model, self.patience = number, model, patience or Patience()
        self._encoders = [Encoder(one, number) for one in codes]
        pairs = zip(layouts, wires, strict=True)
        self._links = [_Link(layout, wire, ClientState(number, epoch)) for layout, wire in pairs]
        lock = threading.RLock()
        self._changed, self._lost = threading.Condition(lock), threading.Condition(lock)
        self._failure: str | None = None
        self._closed = False
        self.waited_seconds = 0.0
        self.received_bytes = self.sent_bytes = 0
        self._keeper = threading.Thread(target=self._keep, name="sessions", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sessions; what was not acknowledged may or may not be applied."""
        with self._changed:
            self._closed = True
            self._lost.notify_all()
        self._keeper.join()
        for link in self._links:
            if link.session is not None:
                link.session.close()

    @property
    def clock(self) -> int:
        """Of what it computes next."""
        return min(link.state.clock for link in self._links)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of what was read last, by server; newer copies may have come since."""
        return tuple(link.read or 0 for link in self._links)

    def read(self) -> list[np.ndarray]:
        """Parameters of each shard, to compute from: the newest that the model allows by now.

        Raises:
          RunError: the deadline passed, with who is late; a server refused something.
        """
        with self._changed:
            self._wait(self._ready, "parameters to compute from")
            if self.model.ahead:
                self._pull(ready=True)
            copies = [link.copy for link in self._links]
            for link in self._links:
                link.read = link.state.version
        return [copy for copy in copies if copy is not None]

    def _ready(self) -> bool:
        self._pull(ready=False)
        return all(protocol.ready(self.model, link.state) for link in self._links)

    def _pull(self, *, ready: bool) -> None:
        for link in self._links:
            state = link.state
            if protocol.ready(self.model, state) == ready and not state.pulling and state.room:
                link.state, message = protocol.pull(state)
                self._send(link, message)

    def push(self, changes: Sequence[np.ndarray], *, tokens: float = 1.0) -> None:
        """Send what was computed from the copy, which is not changed any more; does not wait for it
        to arrive, unless too much is under way.

        Raises:
          RunError: as `read`.
        """
        with self._changed:
            self._wait(lambda: all(link.state.room for link in self._links), "room for a push")
            written = [self._written(*pair) for pair in enumerate(changes)]
            for link, (change, usable) in zip(self._links, written, strict=True):
                link.state, message = protocol.push(
                    link.state, version=link.read, tokens=tokens, usable=usable
                )
                link.payloads[message.stamp.sequence] = change
                self.sent_bytes += change.nbytes
                self._send(link, message)

    def _written(self, at: int, change: np.ndarray) -> tuple[np.ndarray, bool]:
        """A change as it is sent; where it is sent as it is, servers see what is not finite."""
        if not self._encoders:
            return change, True
        return self._encoders[at](change, self._links[at].state.sequence)

    def under_way(self, server: int) -> list[np.ndarray]:
        """Changes that this server has not settled."""
        with self._changed:
            return list(self._links[server].payloads.values())

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that replies bring about.

        Raises:
          RunError: as `read`.
        """
        with self._changed:
            self._wait(condition, what)

    def drain(self) -> None:
        """Wait until all that was sent is settled.

        Raises:
          RunError: as `read`.
        """
        with self._changed:
            settled = lambda: not any(link.payloads for link in self._links)  # noqa: E731
            self._wait(settled, "the last pushes to be applied")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; the lock is held."""
        begun = time.monotonic()
        deadline = begun + self.patience.deadline_seconds
        asked = False
        try:
            while True:
                if self._failure is not None:
                    raise RunError(f"client {self.number}: {self._failure}")
                if condition():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RunError(self._late(what))
                if not asked and left < self.patience.deadline_seconds / 2:
                    asked = True
                    self._ask_late()
                self._changed.wait(min(left, self.patience.deadline_seconds / 2))
        finally:
            self.waited_seconds += time.monotonic() - begun

    def _late(self, what: str) -> str:
        seconds = self.patience.deadline_seconds
        told: list[str] = []
        for link in self._links:
            name = f"server {link.layout.server}"
            if not link.welcome:
                told.append(f"{name} cannot be reached")
            elif link.late:
                told.append(f"{name} waits for {link.late}")
            elif not protocol.ready(self.model, link.state) or link.payloads:
                told.append(f"{name} is late")
        return (
            f"client {self.number} at clock {self.clock} waited {seconds:g} s for {what}: "
            f"{'; '.join(told) or 'nobody is late'}"
        )

    def _ask_late(self) -> None:
        for link in self._links:
            if link.session is not None and link.welcome:
                one = link.state
                link.session.send(
                    Envelope(Op.LATE, one.epoch, self.number, tensor=link.layout.server)
                )

    def _send(self, link: _Link, message: Message) -> None:
        sequence = message.stamp.sequence
        link.asked[sequence] = time.monotonic()
        if link.session is not None and link.welcome:
            payload = link.payloads.get(sequence)
            link.session.send(of_message(message, link.layout.server, payload))

    def _hear(self, link: _Link, envelope: Envelope) -> None:
        with self._changed:
            self._heard(link, envelope)
            self._changed.notify_all()

    def _heard(self, link: _Link, envelope: Envelope) -> None:
        if envelope.client != self.number:
            if envelope.op is Op.REFUSE:
                self._failure = f"server {link.layout.server} refused it: {envelope.text}"
            return
        if envelope.op is Op.WELCOME:
            link.welcome = True
            for message in protocol.retries(link.state):
                self._send(link, message)
            return
        if envelope.op is Op.WAITING:
            link.late = envelope.text
            return
        heard = protocol.hear(link.state, to_reply(envelope))
        link.state = heard.state
        refused = heard.refused
        if envelope.op is Op.REFUSE and envelope.sequence == NO_SEQUENCE:
            refused = envelope.text
        if refused is not None:
            self._failure = f"server {link.layout.server} refused a message: {refused}"
        if heard.takes:
            assert envelope.payload is not None
            link.copy = envelope.payload
            self.received_bytes += envelope.payload.nbytes
        if heard.settled is not None:
            link.payloads.pop(heard.settled, None)

    def _keep(self) -> None:
        """Opens sessions that ended, and sends again what had no answer for too long."""
        while True:
            with self._lost:
                if self._closed:
                    return
                self._again()
                away = [link for link in self._links if link.session is None]
                if not away:
                    self._lost.wait(self.patience.retry_seconds / 4)
            for link in away:
                self._open(link)
                time.sleep(AWAY_SECONDS)

    def _again(self) -> None:
        before = time.monotonic() - self.patience.retry_seconds
        for link in self._links:
            if not link.welcome and link.session is not None and link.greeted <= before:
                self._greet(link, link.session)
            if not link.welcome:
                continue
            under_way = protocol.retries(link.state)
            kept = {message.stamp.sequence for message in under_way}
            link.asked = {number: at for number, at in link.asked.items() if number in kept}
            for message in under_way:
                if link.asked[message.stamp.sequence] <= before:
                    self._send(link, message)

    def _greet(self, link: _Link, session: Session) -> None:
        link.greeted = time.monotonic()
        session.send(Envelope(Op.HELLO, link.state.epoch, self.number, tensor=link.layout.server))

    def _open(self, link: _Link) -> None:
        over = threading.Event()

        def ended(reason: str) -> None:
            with self._changed:
                over.set()
                link.session, link.welcome = None, False
                if "UNAUTHENTICATED" in reason:
                    self._failure = f"server {link.layout.server} does not let it in: {reason}"
                self._changed.notify_all()
                self._lost.notify_all()

        try:
            session = link.wire.open(lambda envelope: self._hear(link, envelope), ended)
        except WireError:
            return
        with self._changed:
            if not over.is_set():
                link.session = session
                self._greet(link, session)
