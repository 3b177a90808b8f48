"""Shared memory: the same envelopes as in frames, and nothing of anybody else's."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from live_servers import Servers, at_once

from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.wire import rpc, shared
from jaxdist.wire.contract import Envelope, Op, Spec
from jaxdist.wire.frames import HEADER_BYTES, Assembler, FrameError, frames, spec_for

pytestmark = pytest.mark.skipif(not shared.supported(), reason="needs Linux on x86")

SPEC = Spec(3, np.dtype(np.float32), 600_000)
WHOLE = Asynchronous(gradient_weight="whole")
BIG = {"w": np.zeros((300, 128), np.float32), "b": np.zeros(3, np.float32)}


def push(**changes: object) -> Envelope:
    payload = np.random.default_rng(0).standard_normal(SPEC.length).astype(np.float32)
    return replace(Envelope(Op.PUSH, sequence=7, tensor=SPEC.tensor, payload=payload), **changes)


@pytest.fixture
def memory():
    made = shared.make(SPEC.size_bytes)
    assert made is not None
    yield made
    made.close()


def assembler(direction: shared.Direction | None) -> Assembler:
    return Assembler(partial(spec_for, push=SPEC, shard=SPEC), direction)


def test_an_envelope_comes_out_as_it_went_in(memory):
    found = shared.open_shared(memory.place)
    into = assembler(found.to_server)
    for number in range(5):  # slots are used again
        sent = push(sequence=number)
        (frame,) = frames(sent, memory.to_server)
        assert len(frame) == HEADER_BYTES
        taken = into.feed(frame)
        assert taken.payload.tobytes() == sent.payload.tobytes()
        assert replace(taken, payload=None) == replace(sent, payload=None)
    assert not memory.to_server.flags.any()


def test_where_no_slot_is_free_and_where_a_payload_is_small_it_travels_in_frames(memory):
    into = assembler(memory.to_server)
    sent = [list(frames(push(sequence=number), memory.to_server)) for number in range(3)]
    assert [len(parts) for parts in sent] == [1, 1, 3]
    heard = [into.feed(frame) for parts in sent for frame in parts]
    assert [one.sequence for one in heard if one is not None] == [0, 1, 2]
    assert memory.to_server.write(np.zeros(shared.LEAST_BYTES - 1, np.uint8)) is None
    assert memory.to_server.write(np.zeros(memory.to_server.slots.shape[1] + 1, np.uint8)) is None


def test_a_slot_that_holds_nothing_is_refused(memory):
    (frame,) = frames(push(), memory.to_server)
    for direction, reason in (
        (None, "slot 0 of the shared memory does not hold"),
        (memory.to_worker, "slot 0 of the shared memory does not hold"),
    ):
        with pytest.raises(FrameError, match=reason):
            assembler(direction).feed(frame)
    into = assembler(memory.to_server)
    into.feed(frame)
    with pytest.raises(FrameError, match="slot 0 of the shared memory does not hold"):
        into.feed(frame)  # twice


def test_a_place_opens_nothing_but_what_was_made_for_it(memory, tmp_path):
    pid, number, nonce = memory.place.split(":")
    other = tmp_path / "file"
    other.write_bytes(bytes(4096 * 5))
    with open(other, "r+b") as file:
        unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, 4096 * 5)
        for place in (
            f"{pid}:{number}:{'0' * 32}",
            f"{pid}:{file.fileno()}:{'0' * 32}",
            f"{pid}:{unsealed}:{'0' * 32}",
            f"{pid}:9999:{nonce}",
            f"../../etc/passwd:{number}:{nonce}",
            f"{pid}:{number}:no hex",
            "", "1", "a:b:c", f"{pid}:-1:{nonce}",
        ):  # fmt: skip
            assert shared.open_shared(place) is None, place
        os.close(unsealed)
    assert shared.open_shared(memory.place) is not None


def test_nobody_can_cut_it_off_under_a_reader(memory):
    pid, number, _ = memory.place.split(":")
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
    os.close(fd)


def test_it_is_gone_with_its_processes():
    code = (
        "from jaxdist.wire import shared\n"
        "import os, signal\n"
        "print(shared.make(2**20).place, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    place = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert place.count(":") == 2
    assert shared.open_shared(place.strip()) is None


def test_where_there_is_none_to_be_had(monkeypatch):
    def no(*args: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", no)
    assert shared.make(2**20) is None
    assert shared.make(10) is None


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.every(2)
def test_workers_push_and_pull_through_it_and_without_it_where_the_server_finds_none(
    monkeypatch, found
):
    if not found:
        monkeypatch.setattr(rpc.shared, "open_shared", lambda place: None)
    written: list[int] = []
    write = shared.Direction.write

    def counted(self: shared.Direction, raw: np.ndarray) -> int | None:
        slot = write(self, raw)
        written.append(raw.size) if slot is not None else None
        return slot

    monkeypatch.setattr(shared.Direction, "write", counted)
    with Servers(WHOLE, 2, params=BIG, count=1, rpc=True, shared_bytes=2**20) as servers:

        def work(number: int) -> None:
            with servers.client(number) as client:
                for _ in range(10):
                    client.push([np.ones_like(one) for one in client.read()])
                client.drain()

        at_once(work, 2)
        assert {float(x) for x in servers.servers[0].shard.params} == {-20.0}
    assert bool(written) == found
