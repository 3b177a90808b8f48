"""A wire within a process: queues carry the frames, as a network would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from jaxdist.wire.contract import Envelope, Hear, Service, Session, Spec
from jaxdist.wire.frames import Assembler, FrameError, frames
from jaxdist.wire.outbox import MOST_SHARDS, Outbox


class _End:
    """A queue at one end of a session, and a thread that delivers its messages to the other end."""

    def __init__(
        self, outbox: Outbox, carry: Callable[[bytes], None], ended: Callable[[], None]
    ) -> None:
        self.outbox, self._carry, self._over = outbox, carry, ended
        self.thread = threading.Thread(target=self._run, name="local session", daemon=True)

    def say(self, envelope: Envelope) -> None:
        self.outbox.put(envelope)

    def close(self) -> None:
        self.outbox.close()

    def _run(self) -> None:
        try:
            while (envelope := self.outbox.take()) is not None:
                for frame in frames(envelope):
                    self._carry(frame)
        finally:
            self._over()


@dataclass(frozen=True)
class LocalWire:
    """A wire to a service in this process.

    Attributes:
      spec_of: the function from an envelope of the service to the specification of its payload, or
        to None if no payload is allowed.
    """

    service: Service
    spec_of: Callable[[Envelope], Spec | None]

    def open(self, hear: Hear, ended: Callable[[str], None]) -> Session:
        """Open a session, as `jaxdist.wire.contract.Wire.open` describes."""
        return _LocalSession(self, hear, ended)


class _LocalSession:
    def __init__(self, wire: LocalWire, hear: Hear, ended: Callable[[str], None]) -> None:
        self._closed, self._ended, self._lock = False, ended, threading.Lock()
        service, heard, arrived = (
            wire.service,
            Assembler(wire.spec_of),
            Assembler(wire.service.spec),
        )

        def to_worker(frame: bytes) -> None:
            envelope = heard.feed(frame)
            if envelope is not None and not self._closed:
                hear(envelope)

        def to_server(frame: bytes) -> None:
            try:
                envelope = arrived.feed(frame)
            except FrameError as error:
                service.rejected(self._server, error.envelope, str(error))
                return
            if envelope is not None:
                service.receive(self._server, envelope)

        def worker_left() -> None:
            self._server.close()
            service.left(self._server)

        self._server = _End(Outbox(MOST_SHARDS), to_worker, self._server_ended)
        self._worker = _End(Outbox(), to_server, worker_left)
        self._server.thread.start()
        self._worker.thread.start()

    def send(self, envelope: Envelope) -> None:
        self._worker.say(envelope)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._worker.close()
        for end in (self._worker, self._server):
            # A callback may close the session in the session's thread, which cannot join itself.
            if threading.current_thread() is not end.thread:
                end.thread.join()

    def _server_ended(self) -> None:
        with self._lock:
            told, self._closed = self._closed, True
        self._worker.close()
        if not told:
            self._ended("the server ended the session")
