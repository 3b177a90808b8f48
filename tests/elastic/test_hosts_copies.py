"""Parts of snapshots between hosts: whole and signed, or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from jaxdist.elastic.hosts import copies, snapshot_replica
from jaxdist.elastic.hosts.copies import CopyError, CopyServer, fetch, list_parts, parts_in, seed
from jaxdist.elastic.hosts.snapshot_replica import SnapshotReplica
from jaxdist.wire.ports import address_of

TOKEN = b"0123456789abcdef"
NAME = "step_00000010.0_of_2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / NAME).write_bytes(bytes(range(256)) * 20_000)
    (theirs / "secret").write_text("of others")
    found = CopyServer(theirs, TOKEN, "127.0.0.1")
    yield f"127.0.0.1:{found.port}"
    found.close()


def test_a_part_comes_as_it_is(server: str, tmp_path: Path):
    assert list_parts(server, TOKEN) == [NAME]
    fetch(server, NAME, tmp_path / "ours", TOKEN)
    assert (tmp_path / "ours" / NAME).read_bytes() == (tmp_path / "theirs" / NAME).read_bytes()
    assert parts_in(tmp_path / "ours") == [NAME]


def test_another_token_gets_nothing(server: str, tmp_path: Path):
    with pytest.raises(CopyError, match="has the same token"):
        fetch(server, NAME, tmp_path / "ours", b"another")
    assert list((tmp_path / "ours").iterdir()) == []


def test_a_server_with_another_token_is_not_believed(tmp_path: Path, monkeypatch):
    """Though it hands out to whoever asks."""
    true = copies._receive
    monkeypatch.setattr(
        copies, "_receive", lambda file, token, nonce, **most: true(file, token, nonce, **most)
        if token == TOKEN else __import__("json").loads(
            __import__("json").loads(file.readline())["body"]),
    )  # fmt: skip
    (tmp_path / NAME).write_text("not ours")
    found = CopyServer(tmp_path, b"another", "127.0.0.1")
    try:
        with pytest.raises(CopyError, match="the host has a different token"):
            fetch(f"127.0.0.1:{found.port}", NAME, tmp_path / "ours", TOKEN)
    finally:
        found.close()


@pytest.mark.parametrize("name", ["secret", "../theirs/secret", "*", "step_00000011.0_of_2"])
def test_only_parts_are_handed_out(server: str, tmp_path: Path, name: str):
    with pytest.raises(CopyError):
        fetch(server, name, tmp_path / "ours", TOKEN)
    with pytest.raises(CopyError):
        list(copies._blocks(server, "../theirs/secret", TOKEN))


@pytest.mark.parametrize(("at", "becomes"), [(-1, b"\x00"), (0, b"\xff")])
def test_what_is_changed_on_its_way_is_refused(server, tmp_path, monkeypatch, at, becomes):
    true = copies.hashlib.file_digest

    def then_changed(file, digest):
        found = true(file, digest)
        raw = bytearray((tmp_path / "theirs" / NAME).read_bytes())
        raw[at] = becomes[0]
        (tmp_path / "theirs" / NAME).write_bytes(raw)
        return found

    monkeypatch.setattr(copies.hashlib, "file_digest", then_changed)
    with pytest.raises(CopyError, match="do not match their digest"):
        fetch(server, NAME, tmp_path / "ours", TOKEN)
    assert list((tmp_path / "ours").iterdir()) == []


def test_what_is_cut_short_is_refused(server, tmp_path, monkeypatch):
    def cut(self, file, offset=0, count=None):
        self.sendall(file.read(1000))

    monkeypatch.setattr(socket.socket, "sendfile", cut)
    with pytest.raises(CopyError, match="5119000 bytes are missing at the end"):
        fetch(server, NAME, tmp_path / "ours", TOKEN)
    assert list((tmp_path / "ours").iterdir()) == []


def test_silence_behind_the_header_of_a_list_is_a_copy_error(monkeypatch):
    """The thread of a replica survives this kind of error alone."""
    monkeypatch.setattr(copies, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as kept:

        def answer():
            connection = kept.enter_context(listening.accept()[0])
            file = kept.enter_context(connection.makefile("rwb"))
            theirs, own = file.read(32), bytes(32)
            file.write(own)
            file.flush()
            copies._receive(file, TOKEN, own)
            copies._send(file, {"bytes": 100, "blake2b": ""}, TOKEN, theirs)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CopyError, match="timed out"):
            list_parts(f"127.0.0.1:{listening.getsockname()[1]}", TOKEN)
        thread.join()


def test_strangers_end_nothing(server: str, tmp_path: Path):
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(40) + b"{}\n", bytes(32) + b"[]\n"):
        host, port = server.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(said)
    assert list_parts(server, TOKEN) == [NAME]


def test_a_replica_has_the_newest_and_of_its_host_alone(server, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_replica, "LOOK_SECONDS", 60.0)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ours.mkdir()
    for step in (20, 30):
        for process in (0, 1):
            (theirs / f"step_{step:08d}.{process}_of_2").write_text(f"{step}")
    for name in ("step_00000005.0_of_2", "step_00000005.1_of_2", "step_00000005.0_of_3"):
        (ours / name).write_text("old")
    found = SnapshotReplica(server, ours, TOKEN, frozenset({0}), 2)
    try:
        found.look()
        assert parts_in(ours) == [
            "step_00000005.0_of_3", "step_00000005.1_of_2",
            "step_00000020.0_of_2", "step_00000030.0_of_2",
        ]  # fmt: skip
    finally:
        found.close()


def test_a_replica_that_is_closed_keeps_nothing_more(server, tmp_path, monkeypatch):
    """Not even what was on its way."""
    monkeypatch.setattr(snapshot_replica, "LOOK_SECONDS", 60.0)
    found = SnapshotReplica(server, tmp_path / "ours", TOKEN, frozenset({0}), 2)
    true = copies._blocks

    def blocks(*given):
        yield from true(*given)
        if given[1] == NAME:
            found.close()

    monkeypatch.setattr(copies, "_blocks", blocks)
    found.look()
    assert list((tmp_path / "ours").iterdir()) == []


def test_what_the_disk_has_is_handed_out_like_the_others(tmp_path: Path):
    disk, folder = tmp_path / "disk", tmp_path / "snapshots"
    seed(disk, folder)  # there is none
    assert not folder.exists()
    disk.mkdir()
    for name in ("step_00000010.0_of_2", "step_00000020.0_of_2", ".step_00000030.0_of_2", "x"):
        (disk / name).write_text(name)
    seed(disk, folder)
    assert parts_in(folder) == ["step_00000010.0_of_2", "step_00000020.0_of_2"]
    assert (folder / "step_00000020.0_of_2").read_text() == "step_00000020.0_of_2"


@pytest.mark.parametrize(
    "request_", [b"[" * 200_000 + b"\n", b"{" * 900 + b"\n", b"x" * 5000, b'{"body": 1}\n', b"\n"]
)
def test_a_stranger_s_nonsense_ends_its_connection_alone(server, tmp_path, request_, capfd):
    host, _, port = server.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(bytes(32) + request_)
        with suppress(OSError):  # the server may have closed it by now
            stranger.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionResetError):
            while block := stranger.recv(4096):
                received += block
    assert len(received) <= 32  # the server's nonce, and nothing more
    assert list_parts(server, TOKEN) == [NAME]
    assert capfd.readouterr().err == ""


def test_it_listens_where_the_others_come_from(tmp_path):
    """Here, on the machine's own loop: by IPv6 too, and on no other address."""
    for host, where in (("127.0.0.1", "127.0.0.1"), ("localhost", None), ("::1", "::1")):
        try:
            found = CopyServer(tmp_path, TOKEN, host)
        except OSError:
            pytest.skip(f"this machine has no {host}")
        try:
            assert list_parts(address_of(host, found.port), TOKEN) == []
            assert where in (None, found._server.server_address[0])
        finally:
            found.close()
    # A name that leads nowhere, or an address behind a translation: all addresses.
    found = CopyServer(tmp_path, TOKEN, "192.0.2.1")
    try:
        assert found._server.server_address[0] in ("::", "0.0.0.0")
    finally:
        found.close()


def test_a_replica_that_makes_no_copies_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_replica, "LOOK_SECONDS", 0.01)
    said, theirs = [], tmp_path / "theirs"
    theirs.mkdir()
    found = CopyServer(theirs, TOKEN, "127.0.0.1")
    address = f"127.0.0.1:{found.port}"
    replica = SnapshotReplica(
        address, tmp_path / "ours", b"another", frozenset({0}), 2, said.append
    )
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert replica.failure == said[0]
    replica.token = TOKEN
    while len(said) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    replica.close()
    found.close()
    assert replica.failure is None
    assert [" being copied again" in line for line in said] == [False, True]
    assert "cannot be copied at present: " in said[0]
