"""Pushes over loopback: jaxdist's wire compared with gRPC in one message and a plain socket."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np

from benchmarks.core.harness import REPEATS, WARMUP, Sample, interleave
from benchmarks.core.report import Figure
from benchmarks.param_server.receivers import ONE_METHOD, UNLIMITED, spec_of
from benchmarks.param_server.serving import wire_to
from jaxdist.errors import RunError
from jaxdist.runtime.environment import python_module
from jaxdist.wire.contract import Envelope, Op

PUSH_BYTES = 64 * 2**20
GOAL_GB_PER_S = 0.9
LOST_SECONDS = 60
Push = Callable[[], None]


def figures(repeats: int = REPEATS, size_bytes: int = PUSH_BYTES) -> list[Figure]:
    """Compare the times of pushing a tensor, which the receiver adds to a total."""
    payload = np.ones(size_bytes // 4, np.float32)
    with ExitStack() as stack:
        ours = stack.enter_context(_streamed(payload))
        shared = stack.enter_context(_streamed(payload, shared_bytes=payload.nbytes))
        message = stack.enter_context(_one_message(payload))
        bare = stack.enter_context(_raw_tcp(payload))
        first, one = interleave(ours, message, warmup=WARMUP, repeats=repeats)
        second, raw = interleave(ours, bare, warmup=WARMUP, repeats=repeats)
        third, memory = interleave(ours, shared, warmup=WARMUP, repeats=repeats)
    own = Sample(first.seconds + second.seconds + third.seconds)
    size = f"{size_bytes / 2**20:g} MiB"
    rate = size_bytes / own.median / 1e9
    return [
        Figure(
            f"push of {size}, beside {GOAL_GB_PER_S:g} GB/s",
            rate,
            GOAL_GB_PER_S,
            ">= 1",
            "GB/s",
            "gRPC in frames of 1 MiB, each checked by crc32c, one stream, loopback, in the clear; "
            "until the receiver has added it and said so",
        ),
        Figure.compare(f"push of {size}, beside gRPC as one message", first, one),
        Figure.compare(f"push of {size}, beside a bare socket", second, raw),
        Figure.compare(f"push of {size}, beside ours through shared memory", third, memory),
    ]


@contextmanager
def _receiver(kind: str, size_bytes: int) -> Iterator[int]:
    """Start a receiver in a new process, and yield its port."""
    command = python_module("benchmarks.param_server.receivers", kind, str(size_bytes))
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RunError(f"no receiver was started: run `{' '.join(command)}` by hand")
        yield int(line)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()


@contextmanager
def _streamed(payload: np.ndarray, shared_bytes: int = 0) -> Iterator[Push]:
    spec = spec_of(payload.nbytes)
    with _receiver("streamed", payload.nbytes) as port:
        answered = threading.Event()
        wire = wire_to(port, spec, shared_bytes)
        session = wire.open(lambda envelope: answered.set(), lambda reason: None)

        def push() -> None:
            answered.clear()
            session.send(Envelope(Op.PUSH, payload=payload))
            if not answered.wait(LOST_SECONDS):
                raise RunError(f"a push was not acknowledged within {LOST_SECONDS} s")

        yield push
        session.close()


@contextmanager
def _one_message(payload: np.ndarray) -> Iterator[Push]:
    with (
        _receiver("one_message", payload.nbytes) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}", UNLIMITED) as channel,
    ):
        call = channel.unary_unary(ONE_METHOD)
        # gRPC sends `bytes`, so the time of its push includes this copy.
        yield lambda: call(payload.tobytes(), timeout=LOST_SECONDS, wait_for_ready=True)


@contextmanager
def _raw_tcp(payload: np.ndarray) -> Iterator[Push]:
    with (
        _receiver("raw_tcp", payload.nbytes) as port,
        socket.create_connection(("127.0.0.1", port), LOST_SECONDS) as connection,
    ):

        def push() -> None:
            connection.sendall(payload.data)
            connection.recv(1)

        yield push
