"""Programs that receive timed pushes, and add every push to a total.

`python -m benchmarks.param_server.receivers KIND BYTES` prints its port, and runs until the end of
its input.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from jaxdist.wire.contract import Envelope, Op, Peer, Spec
from jaxdist.wire.frames import spec_for
from jaxdist.wire.rpc import RpcServer

TOKEN = "a token of a bench, which lasts a minute"
ONE_METHOD = "/bench.OneMessage/Push"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def spec_of(size_bytes: int) -> Spec:
    """Return the spec of a float32 payload of this many bytes."""
    return Spec(0, np.dtype(np.float32), size_bytes // 4)


class Adding:
    """A service that adds each push to a total, and acknowledges it."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.total = spec, np.zeros(spec.length, spec.dtype)

    def spec(self, envelope: Envelope) -> Spec | None:
        return spec_for(envelope, self._spec, self._spec)

    def receive(self, peer: Peer, envelope: Envelope) -> None:
        assert envelope.payload is not None
        self.total += envelope.payload
        peer.say(Envelope(Op.ACKNOWLEDGE, sequence=envelope.sequence))

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        raise AssertionError(reason)

    def left(self, peer: Peer) -> None:
        pass


def streamed(size_bytes: int) -> int:
    """Receive over jaxdist's wire; return the port."""
    global _kept
    _kept = RpcServer(Adding(spec_of(size_bytes)), TOKEN)
    return _kept.port


def one_message(size_bytes: int) -> int:
    """Receive over gRPC, with each push as one message; return the port."""
    global _kept
    total = np.zeros(size_bytes // 4, np.float32)

    def push(message: bytes, context: grpc.ServicerContext) -> bytes:
        np.add(total, np.frombuffer(message, np.float32), out=total)
        return b"\0"

    handler = grpc.method_handlers_generic_handler(
        "bench.OneMessage", {"Push": grpc.unary_unary_rpc_method_handler(push)}
    )
    _kept = server = grpc.server(ThreadPoolExecutor(2), options=UNLIMITED)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port


def raw_tcp(size_bytes: int) -> int:
    """Receive over a plain socket into one buffer; return the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        buffer, total = bytearray(size_bytes), np.zeros(size_bytes // 4, np.float32)
        while True:
            left = memoryview(buffer)
            while left:
                count = connection.recv_into(left)
                if not count:
                    return
                left = left[count:]
            np.add(total, np.frombuffer(buffer, np.float32), out=total)
            connection.sendall(b"\0")

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1]


_kept: object = None
"""A reference to the server, which would be closed when it is garbage-collected."""
KINDS: dict[str, Callable[[int], int]] = {
    "streamed": streamed,
    "one_message": one_message,
    "raw_tcp": raw_tcp,
}


if __name__ == "__main__":
    print(KINDS[sys.argv[1]](int(sys.argv[2])), flush=True)
    sys.stdin.read()
