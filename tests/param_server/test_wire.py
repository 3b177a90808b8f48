"""Frames: what was sent arrives, and nothing else is taken."""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import google_crc32c
import grpc
import jax.numpy as jnp
import numpy as np
import pytest
from live_servers import TOKEN, Servers
from pydantic import ValidationError

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.wire.config import ProcessesConfig, TlsConfig
from jaxdist.wire.contract import OF_WORKERS, Envelope, Op, Spec, WireError
from jaxdist.wire.frames import (
    CHUNK_BYTES,
    CRC,
    HEAD,
    HEADER_BYTES,
    TEXT_BYTES,
    Assembler,
    FrameError,
    frames,
    parse_frame,
    spec_for,
    text_payload,
)
from jaxdist.wire.outbox import MOST_SHARDS, MOST_WAITING, Outbox
from jaxdist.wire.rpc import METHOD, RpcServer
from jaxdist.wire.security import (
    TOKEN_KEY,
    make_token,
    read_token,
    same_token,
)

SPEC = Spec(3, np.dtype(np.float32), 600_000)
WHOLE = Asynchronous(gradient_weight="whole")


def push(**changes: object) -> Envelope:
    payload = np.random.default_rng(0).standard_normal(SPEC.length).astype(np.float32)
    whole = Envelope(Op.PUSH, 2, 2**40, 2**50, 7, 6, 0, 1.5, True, SPEC.tensor, payload)
    return replace(whole, **changes)


def assembler(spec: Spec = SPEC) -> Assembler:
    return Assembler(partial(spec_for, push=spec, shard=spec))


REMEDY = "install the same version of jaxdist on both sides"


def refused(frame: bytes, into: Assembler | None = None) -> str:
    with pytest.raises(FrameError) as caught:
        (into or assembler()).feed(frame)
    return str(caught.value)


def changed(frame: bytes, offset: int, value: bytes) -> bytes:
    """A frame with other bytes at an offset of its header, and the crc that goes with them."""
    head = bytearray(frame[: HEAD.size])
    head[offset : offset + len(value)] = value
    rest = frame[HEADER_BYTES:]
    crc = google_crc32c.extend(google_crc32c.value(bytes(head)), rest)
    return bytes(head) + CRC.pack(crc) + rest


def test_an_envelope_comes_out_as_it_went_in():
    sent, into = push(), assembler()
    parts = list(frames(sent))
    assert [len(part) for part in parts[:-1]] == [HEADER_BYTES + CHUNK_BYTES] * 2
    *first, last = [into.feed(part) for part in parts]
    assert first == [None, None]
    assert last is not None
    assert last.payload.tobytes() == sent.payload.tobytes()
    assert replace(last, payload=None) == replace(sent, payload=None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "uint8"])
def test_every_dtype(dtype):
    payload = np.arange(5).astype(jnp.dtype(dtype))
    spec = Spec(0, payload.dtype, 5)
    (frame,) = frames(Envelope(Op.ANSWER, payload=payload))
    found = assembler(spec).feed(frame)
    assert found.payload.dtype == payload.dtype
    assert found.payload.tobytes() == payload.tobytes()


def test_what_has_no_payload_and_what_is_text():
    for op in (Op.PULL, Op.HELLO, Op.ACKNOWLEDGE):
        (frame,) = frames(Envelope(op, 1, 2, 3))
        assert assembler().feed(frame) == Envelope(op, 1, 2, 3)
    (frame,) = frames(Envelope(Op.REFUSE, payload=text_payload("no: " + "x" * TEXT_BYTES)))
    assert assembler().feed(frame).text == "no: " + "x" * (TEXT_BYTES - 4)
    (frame,) = frames(Envelope(Op.REFUSE, payload=text_payload("")))
    assert assembler().feed(frame).text == ""


FIELDS = [
    (0, b"HTTP", "magic"),
    (4, struct.pack("<H", 1), "format 1 instead of 2"),
    (6, b"\xff", "operation 255 is unknown"),
    (7, b"\x09", "dtype 9"),
    (7, b"\x04", "float64.600000., but tensor 3, float32.600000. is"),
    (9, b"\x02", "ndim 2"),
    (10, b"\x01\x00", "declares a payload of .* but contains"),
    (12, struct.pack("<I", 4), "tensor 4, .* but tensor 3"),
    (16, struct.pack("<Q", 2**62), "float32.4611686018427387904., but"),
    (16, struct.pack("<Q", 599_999), "float32.599999., but"),
    (24, struct.pack("<Q", 8), "bytes 8 to .* but 0 of"),
    (32, struct.pack("<I", 12), "declares a payload of 12 bytes"),
]


@pytest.mark.parametrize(("offset", "value", "reason"), FIELDS)
def test_a_wrong_field_is_refused_with_its_reason(offset, value, reason):
    frame = next(frames(push()))
    with pytest.raises(FrameError, match=reason):
        assembler().feed(changed(frame, offset, value))


def test_a_changed_bit_is_refused_wherever_it_is():
    (frame,) = frames(push(payload=np.ones(20, np.float32)))
    into = assembler(replace(SPEC, length=20))
    assert into.feed(frame) is not None
    for at in range(8 * len(frame)):
        wrong = bytearray(frame)
        wrong[at // 8] ^= 1 << at % 8
        assert refused(bytes(wrong), into)


def test_lengths_that_are_no_frame():
    frame = next(frames(push()))
    for wrong in (b"", frame[:50], frame + b"x", frame[:-1]):
        assert refused(wrong)


def test_frames_in_another_order_and_of_two_envelopes():
    parts, into = list(frames(push())), assembler()
    assert "but 0 of" in refused(parts[1], into)
    into.feed(parts[0])
    assert "but 1048576 of" in refused(parts[0], into)
    into.feed(parts[0])
    other = list(frames(push(sequence=9)))
    assert "before the previous envelope is complete" in refused(other[1], into)
    assert [into.feed(part) is None for part in parts] == [True, True, False]  # it goes on


def test_payloads_that_an_op_does_not_have():
    (frame,) = frames(Envelope(Op.PULL, payload=np.zeros(1, np.float32)))
    assert refused(frame) == f"PULL has a payload, but must not have one; {REMEDY}"
    (frame,) = frames(push(payload=None))
    assert refused(frame) == f"PUSH has no payload, but needs one; {REMEDY}"
    (frame,) = frames(Envelope(Op.REFUSE, payload=np.zeros(TEXT_BYTES + 1, np.uint8)))
    assert f"a text with {TEXT_BYTES + 1} elements" in refused(frame)


def test_nothing_is_allocated_for_what_is_refused():
    """A frame that announces 2^62 elements costs no memory."""
    frame = changed(next(frames(push())), 16, struct.pack("<Q", 2**45))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        refused(frame)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def garbage(rng: random.Random, good: bytes) -> bytes:
    """A frame at random: noise, or a good one that was cut, lengthened, or changed."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return good[: rng.randrange(len(good))]
        case 2:
            return good + rng.randbytes(rng.randrange(1, 50))
        case 3:
            wrong = bytearray(good)
            wrong[rng.randrange(len(wrong))] ^= rng.randrange(1, 256)
            return bytes(wrong)
        case _:
            offset = rng.randrange(HEAD.size)
            return changed(good, offset, rng.randbytes(min(8, HEAD.size - offset)))


def until_ended(answers: Iterator[bytes]) -> Iterator[bytes]:
    """The server ends what the worker ends, which gRPC calls an error."""
    with suppress(grpc.RpcError):
        yield from answers


def memory_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.full
def test_a_server_lives_through_any_frames_and_serves_the_next_call(count):
    rng = random.Random(count)
    with Servers(WHOLE, 1, count=1, rpc=True) as servers:
        layout, service = servers.layouts[0], servers.servers[0]
        payload = np.zeros(layout.length, np.float32)
        good = next(frames(Envelope(Op.PUSH, payload=payload)))
        hello = next(frames(Envelope(Op.HELLO)))
        with grpc.insecure_channel(f"127.0.0.1:{servers.rpcs[0].port}") as channel:
            call = channel.stream_stream(METHOD)
            before, left = memory_kib(), count
            while left:
                some = min(left, 400)  # so that the answers that wait do not end the session
                sent = iter([hello, *(garbage(rng, good) for _ in range(some)), hello])
                answers = call(sent, metadata=((TOKEN_KEY, TOKEN),), timeout=60)
                said = {parse_frame(frame).envelope.op for frame in until_ended(answers)}
                assert not said & OF_WORKERS
                left -= some
        assert sum(service.counters.refused.values()) > count / 2
        assert len(service.counters.refused) <= 65
        assert memory_kib() - before < 64 * 1024
        applied = service.counters.applied  # a changed tokens or clock may be one to take
        service.admit(1)
        with servers.client(1) as client:
            client.push([read + 1 for read in client.read()])
            client.drain()
        assert service.counters.applied == applied + 1
        assert service.shard.params.tolist() == [-1.0] * layout.length


def test_no_token_no_session():
    with Servers(WHOLE, 1, count=1, rpc=True) as servers:
        address = f"127.0.0.1:{servers.rpcs[0].port}"
        for metadata in ((), ((TOKEN_KEY, TOKEN[:-1] + "x"),), ((TOKEN_KEY, ""),)):
            with grpc.insecure_channel(address) as channel:
                hello = frames(Envelope(Op.HELLO))
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(METHOD)(hello, metadata=metadata, timeout=20))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        wire = replace(servers.wires[0], token="another token of enough letters, sorry")
        with (
            servers.client(0, wires=[wire]) as client,
            pytest.raises(RunError, match="server 0 refuses to admit the client: UNAUTHENTICATED"),
        ):
            client.read()
        assert servers.servers[0].counters.received_bytes == 0


def test_a_port_that_is_taken():
    with Servers(WHOLE, 1, count=1, rpc=True) as servers:
        port = servers.rpcs[0].port
        with pytest.raises(WireError, match=f"cannot listen on 127.0.0.1:{port}"):
            RpcServer(servers.servers[0], TOKEN, port=port)


def test_token_files(tmp_path):
    path = tmp_path / "token"
    make_token(path)
    token = read_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert same_token(token, token)
    assert not same_token(token[:-1], token)
    assert not same_token(None, token)
    path.chmod(0o644)
    with pytest.raises(RunError, match=r"can be read by other users \(mode 644\): run chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(RunError, match="has 5 characters, but a token needs at least 32"):
        read_token(path)
    with pytest.raises(RunError, match="nowhere cannot be read: No such file"):
        read_token(tmp_path / "nowhere")


def test_a_network_needs_certificates():
    files = {name: Path(name) for name in ("authority", "certificate", "key")}
    ProcessesConfig(host="127.0.0.1")
    ProcessesConfig(host="10.0.0.1", tls=TlsConfig(**files))
    for host in ("10.0.0.1", "0.0.0.0", "::", "example"):
        with pytest.raises(ValidationError, match="set certificates"):
            ProcessesConfig(host=host)


def test_an_outbox_keeps_the_newest_publication_and_ends_when_nobody_reads():
    outbox = Outbox()
    for version in range(3):
        outbox.put(Envelope(Op.PUBLISH, version=version))
    outbox.put(Envelope(Op.ACKNOWLEDGE))
    taken = [outbox.take() for _ in range(len(outbox))]
    assert [(one.op, one.version) for one in taken] == [(Op.PUBLISH, 2), (Op.ACKNOWLEDGE, 0)]
    put = [outbox.put(Envelope(Op.REFUSE)) for _ in range(MOST_WAITING + 1)]
    assert [a and not b for a, b in pairwise(put)].index(True) == MOST_WAITING - 1
    assert outbox.take() is None


def test_a_worker_that_reads_no_parameters_holds_only_so_many_versions():
    outbox = Outbox(MOST_SHARDS)
    answers = [Envelope(Op.ANSWER, sequence=at, payload=np.zeros(1)) for at in range(20)]
    assert [outbox.put(one) for one in answers] == [True] * MOST_SHARDS + [False] * 4
    assert outbox.take() is None


def test_sessions_that_are_too_many_are_refused():
    with Servers(WHOLE, 3, count=1) as servers:
        rpc = RpcServer(servers.servers[0], TOKEN, sessions=2)
        known, ended = ((TOKEN_KEY, TOKEN),), threading.Event()

        def waits(client: int) -> Iterator[bytes]:
            yield next(frames(Envelope(Op.HELLO, client=client)))
            ended.wait(20)

        with grpc.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
            call = channel.stream_stream(METHOD)
            first, second = (call(waits(client), metadata=known) for client in range(2))
            assert {parse_frame(next(one)).envelope.op for one in (first, second)} == {Op.WELCOME}
            with pytest.raises(grpc.RpcError) as caught:
                list(call(waits(2), metadata=known, timeout=20))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            ended.set()
        rpc.close()


SERVERS_THAT_END = """
import time
from concurrent.futures import ThreadPoolExecutor
from jaxdist.wire import rpc
echo = rpc.grpc.stream_stream_rpc_method_handler(lambda frames, context: frames)
for turn in range(20):
    server = rpc.grpc.server(ThreadPoolExecutor(4))
    handlers = rpc.grpc.method_handlers_generic_handler("a", {"b": echo})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    def slow():
        yield b"x"
        time.sleep(0.1)
    channels = [rpc.grpc.insecure_channel(f"127.0.0.1:{port}") for _ in range(3)]
    calls = [channel.stream_stream("/a/b")(slow()) for channel in channels]
    for call in calls:
        next(call)
    server.stop(0)
    del server
"""


@pytest.mark.full
def test_a_server_that_ends_prints_nothing():
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", SERVERS_THAT_END],
        env=environ, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
