"""The transport over gRPC, with one stream of frames per session and direction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import grpc

from jaxdist.wire import shared
from jaxdist.wire.contract import (
    Envelope,
    Hear,
    RefusedError,
    Service,
    Session,
    Spec,
    WireError,
)
from jaxdist.wire.frames import FRAME_BYTES, Assembler, FrameError, frames
from jaxdist.wire.outbox import MOST_SHARDS, Outbox
from jaxdist.wire.ports import address_of
from jaxdist.wire.security import TOKEN_KEY, Tls, certificate_refusal, same_token

SERVICE = "jaxdist.ParameterServer"
METHOD = f"/{SERVICE}/Session"
CONNECT_SECONDS = 2.0
SHARED_KEY = "jaxdist-shared"
"""The key of an entry in the metadata of a gRPC call. The worker's value is the location of its
shared memory. The server's value states whether the server opened the memory."""
COMMON: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.max_send_message_length", FRAME_BYTES),
    ("grpc.max_metadata_size", 4096),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # 0 removes gRPC's limit on pings without data, so that the keepalive also detects the loss of a
    # peer in an idle session.
    ("grpc.http2.max_pings_without_data", 0),
)
OF_SERVER: Sequence[tuple[str, int]] = (
    *COMMON,
    # With SO_REUSEPORT, gRPC's default, two servers could listen on one port without an error.
    ("grpc.so_reuseport", 0),
    # The interval is shorter than the workers' keepalive time. A server ends the connection of a
    # client that pings more often than this interval allows.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
OF_CLIENT: Sequence[tuple[str, int]] = (
    *COMMON,
    ("grpc.use_local_subchannel_pool", 1),  # Each session gets a separate connection.
    # jaxdist itself repeats unanswered messages, and applies each once.
    ("grpc.enable_retries", 0),
    # A proxy in the environment is for the internet, not for the processes of a run.
    ("grpc.enable_http_proxy", 0),
)


class _Call(Protocol):
    """The methods of a gRPC call that a worker uses."""

    def __iter__(self) -> Iterator[bytes]: ...

    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class _Peer(Outbox):
    """A session over gRPC, from the server's side."""

    def say(self, envelope: Envelope) -> None:
        self.put(envelope)


class RpcServer:
    """A gRPC server that offers one service on one port.

    Args:
      host: the address of this machine.
      port: the port to listen on; 0 takes a free port.
      token: the token that every session must present.
      tls: the TLS credentials; None sends plain text, which `ProcessesConfig` allows on this
        machine only.
      sessions: the largest number of concurrent sessions; more sessions are refused.

    Raises:
      WireError: the port is in use, or the address is not an address of this machine.
    """

    def __init__(
        self,
        service: Service,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
        sessions: int = 64,
    ) -> None:
        self._service, self._token = service, token
        self._free = threading.Semaphore(sessions)
        # The extra thread refuses sessions beyond the limit.
        self._server = grpc.server(
            ThreadPoolExecutor(sessions + 1),
            options=[*OF_SERVER],
            # By default gRPC queues a call for which no thread is free. With this limit, gRPC
            # refuses the call.
            maximum_concurrent_rpcs=sessions + 1,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        generic = grpc.method_handlers_generic_handler(SERVICE, {"Session": handler})
        self._server.add_generic_rpc_handlers((generic,))
        address = address_of(host, port)
        try:
            self.port = (
                self._server.add_insecure_port(address)
                if tls is None
                else self._server.add_secure_port(address, tls.server())
            )
        except RuntimeError as error:
            raise WireError(
                f"cannot listen on {address}: another process uses the port, or the address does "
                "not belong to this machine; choose another port, or 0 for a free one"
            ) from error
        self._server.start()

    def close(self) -> None:
        """End all sessions and close the port."""
        self._server.stop(grace=None).wait()

    def _session(self, given: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata() or ())
        if not same_token(metadata.get(TOKEN_KEY), self._token):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token differs from the token of this server: use the token file of the run",
            )
        if not self._free.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions")
        try:
            place = str(metadata.get(SHARED_KEY, ""))
            memory = shared.open_shared(place) if place else None
            context.send_initial_metadata(((SHARED_KEY, "no" if memory is None else "yes"),))
            yield from self._answered(given, context, memory)
        finally:
            self._free.release()

    def _answered(
        self, given: Iterator[bytes], context: grpc.ServicerContext, memory: shared.Shared | None
    ) -> Iterator[bytes]:
        peer = _Peer(MOST_SHARDS)
        # `take` below waits for the next envelope. This callback ends the wait when the client's
        # call ends.
        if not context.add_callback(peer.close):
            return  # The client's call has already ended.
        to_server, to_worker = (memory.to_server, memory.to_worker) if memory else (None, None)
        reader = threading.Thread(target=self._read, args=(given, peer, to_server), name="session")
        reader.start()
        try:
            while (envelope := peer.take()) is not None:
                yield from frames(envelope, to_worker)
        finally:
            peer.close()
            # The reader thread may be waiting for a frame, so the call is cancelled before the
            # join.
            context.cancel()
            reader.join()
            self._service.left(peer)

    def _read(
        self, given: Iterator[bytes], peer: _Peer, to_server: shared.Direction | None
    ) -> None:
        service = self._service
        assembler = Assembler(service.spec, to_server)
        try:
            for frame in given:
                try:
                    envelope = assembler.feed(frame)
                except FrameError as error:
                    service.rejected(peer, error.envelope, str(error))
                    continue
                if envelope is not None:
                    service.receive(peer, envelope)
        except grpc.RpcError:
            pass  # The worker has ended the session.
        finally:
            peer.close()


@dataclass(frozen=True)
class RpcWire:
    """A client's connection to an `RpcServer`.

    Attributes:
      address: the address of the server, `host:port`.
      spec_of: the function from a server's envelope to the specification of its payload, or to
        None if no payload is allowed.
      tls: the TLS credentials; None sends plain text.
      shared_bytes: the largest payload, in bytes, that is sent through shared memory if the server
        is a process of the same user on this machine; 0 sends all payloads through the socket.
    """

    address: str
    token: str
    spec_of: Callable[[Envelope], Spec | None]
    tls: Tls | None = None
    shared_bytes: int = 0

    def open(self, hear: Hear, ended: Callable[[str], None]) -> Session:
        """Open a session, as `jaxdist.wire.contract.Wire.open` describes."""
        return _RpcSession(self, hear, ended)


class _RpcSession:
    def __init__(self, wire: RpcWire, hear: Hear, ended: Callable[[str], None]) -> None:
        self._wire, self._hear, self._ended = wire, hear, ended
        self._outbox = Outbox()
        self._closed = False
        options = [*OF_CLIENT]
        self._channel = (
            grpc.insecure_channel(wire.address, options)
            if wire.tls is None
            else grpc.secure_channel(wire.address, wire.tls.channel(), options)
        )
        try:
            grpc.channel_ready_future(self._channel).result(CONNECT_SECONDS)
        except grpc.FutureTimeoutError as error:
            self._channel.close()
            why = (
                None
                if wire.tls is None
                else certificate_refusal(wire.address, wire.tls, CONNECT_SECONDS)
            )
            if why is not None:
                raise RefusedError(
                    f"the certificates of {wire.address} and of this process do not match: "
                    f"{why}; use certificates of one authority (strategy.processes.tls)"
                ) from error
            raise WireError(
                f"no server answers at {wire.address} within {CONNECT_SECONDS:g} s: check that the "
                "server runs, and that no firewall blocks its port"
            ) from error
        self._memory = shared.make(wire.shared_bytes)
        metadata: tuple[tuple[str, str], ...] = ((TOKEN_KEY, wire.token),)
        if self._memory is not None:
            metadata += ((SHARED_KEY, self._memory.place),)
        # This direction stays None until the server agrees to share the memory.
        self._to_server: shared.Direction | None = None
        call = self._channel.stream_stream(METHOD)
        self._call: _Call = call(self._frames(), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="session", daemon=True)
        self._reader.start()

    def send(self, envelope: Envelope) -> None:
        self._outbox.put(envelope)

    def close(self) -> None:
        self._closed = True
        self._outbox.close()
        self._channel.close()
        # The reader's thread may call this method through `hear` or `ended`, and a thread cannot
        # join itself.
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _frames(self) -> Iterator[bytes]:
        while (envelope := self._outbox.take()) is not None:
            yield from frames(envelope, self._to_server)

    def _agree(self) -> shared.Direction | None:
        """Return the shared memory's direction to the worker, or None without shared memory.

        The memory is shared only if the server opened the memory that the worker created.
        """
        memory, answer = self._memory, dict(self._call.initial_metadata() or ())
        if memory is None:
            return None
        memory.close()  # The memory stays mapped: only the server needed the descriptor.
        if answer.get(SHARED_KEY) != "yes":
            return None
        self._to_server = memory.to_server
        return memory.to_worker

    def _read(self) -> None:
        reason = "the server ended the session"
        try:
            assembler = Assembler(self._wire.spec_of, self._agree())
            for frame in self._call:
                envelope = assembler.feed(frame)
                if envelope is not None and not self._closed:
                    self._hear(envelope)
        except FrameError as error:
            reason = f"the server sent an answer that cannot be read: {error}"
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: None)()
            details = getattr(error, "details", lambda: "")()
            reason = f"{code.name if code else 'error'}: {details}"
        finally:
            # A thread of gRPC may still wait in `_frames` for the next envelope. Closing the outbox
            # ends this wait.
            self._outbox.close()
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._ended(reason)
