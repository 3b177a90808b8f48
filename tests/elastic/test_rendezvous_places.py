"""What hosts meet at: a directory, a Redis server, etcd; and what is not fit for it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certified
from etcd_place import etcd_server
from redis_place import free_port, redis_server

from jaxdist.elastic.hosts.rendezvous import folder as folder_module
from jaxdist.elastic.hosts.rendezvous.address import open_rendezvous
from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous, RendezvousError, Token
from jaxdist.elastic.hosts.rendezvous.redis_server import RedisRendezvous
from jaxdist.errors import ConfigError


@pytest.fixture(params=["folder", "redis", "etcd"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "meet")
        return
    server = redis_server if request.param == "redis" else etcd_server
    with server(tmp_path) as (address, _):
        yield address


def test_values_are_there_whole_or_not(address: str):
    one, other = open_rendezvous(address), open_rendezvous(address)
    assert (one.get("host/a"), one.names("host")) == (None, [])
    one.put("host/b", {"x": [1, None]})
    one.put("host/a", 1)
    other.put("host/a", "two")
    assert (one.get("host/a"), other.get("host/b")) == ("two", {"x": [1, None]})
    assert one.names("host") == ["a", "b"]
    assert one.names("answer") == []
    other.drop("host/a")
    other.drop("host/a")
    assert one.names("host") == ["b"]


def test_of_those_that_swap_one_token_one_succeeds(address: str):
    places = [open_rendezvous(address) for _ in range(4)]
    assert len({place.token() for place in places}) == 1
    wins: list[list[int]] = [[] for _ in places]

    def race(index: int, place: Rendezvous) -> None:
        for _ in range(60):
            token = Token.parse(place.token())
            if place.compare_and_swap(str(token), str(token.taken(f"h{index}"))):
                wins[index].append(token.term + 1)

    threads = [threading.Thread(target=race, args=one) for one in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    terms = sorted(term for found in wins for term in found)
    assert terms == list(range(1, len(terms) + 1))  # each was taken once
    last = Token.parse(places[0].token())
    assert last.term == len(terms)
    assert wins[int(last.holder[1:])][-1] == last.term


def test_runs_on_one_redis_server_have_names(tmp_path: Path):
    with redis_server(tmp_path) as (address, _):
        one, other = open_rendezvous(f"{address}/0#one"), open_rendezvous(f"{address}/0#other")
        one.put("host/a", 1)
        assert other.names("host") == []
        assert one.token() != other.token()


def test_a_server_that_is_gone_or_empty_is_told(tmp_path: Path):
    with redis_server(tmp_path) as (address, process):
        place = open_rendezvous(address)
        place._server.flushall()
        with pytest.raises(RendezvousError, match="has lost its content"):
            place.token()
        process.kill()
        process.wait()
        with pytest.raises(RendezvousError, match="cannot be reached"):
            place.get("host/a")
    nobody = f"redis://:secret@127.0.0.1:{free_port()}"
    with pytest.raises(RendezvousError, match=r"rendezvous redis://127\.0\.0\.1:\d+ cannot be"):
        RedisRendezvous(nobody)


def test_runs_on_one_etcd_have_names_and_a_member_that_is_gone_is_passed_over(tmp_path: Path):
    with etcd_server(tmp_path) as (address, process):
        member = address.removeprefix("etcd://")
        two = f"etcd://127.0.0.1:{free_port()},{member}"
        one, other = open_rendezvous(f"{two}#one"), open_rendezvous(f"{address}#other")
        one.put("host/a", 1)
        assert (other.names("host"), one.names("host")) == ([], ["a"])
        assert one.token() != other.token()
        one._call("kv/deleterange", {"key": one._key("token")})
        with pytest.raises(RendezvousError, match="has lost its content"):
            one.token()
        process.kill()
        process.wait()
        with pytest.raises(RendezvousError, match=r"etcd://.* cannot be reached: 127\.0\.0\.1:"):
            other.get("host/a")


def test_a_swap_whose_answer_is_lost_is_looked_up(tmp_path: Path, monkeypatch):
    with etcd_server(tmp_path) as (address, _):
        place = open_rendezvous(address)
        asked, new = place._asked, str(Token.parse(place.token()).taken("h0"))

        def cut(member, path, body):
            found = asked(member, path, body)
            if path.endswith("txn"):
                raise OSError("cut off")
            return found

        monkeypatch.setattr(place, "_asked", cut)
        assert place.compare_and_swap(place.token(), new)
        with pytest.raises(RendezvousError, match="cut off"):
            place.compare_and_swap("old", "other")


@pytest.mark.parametrize(
    ("address", "words"),
    [("etcd://node1:2379", "on another machine and lacks TLS"),
     ("etcd://127.0.0.1", "'127.0.0.1' is not HOST:PORT"),
     ("etcd://me:word@127.0.0.1:1", "authenticate with a certificate"),
     ("etcds://node1:2379", "set JAXDIST_ETCD_CA, JAXDIST_ETCD_CERTIFICATE, JAXDIST_ETCD_KEY")],
)  # fmt: skip
def test_addresses_of_etcd_that_are_refused(address, words):
    with pytest.raises(ConfigError, match=words):
        open_rendezvous(address)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_etcd_lets_hosts_in_by_their_certificates(tmp_path: Path, monkeypatch):
    ours, other = certified(tmp_path / "ours"), certified(tmp_path / "other")
    files = {"trusted-ca-file": ours.authority, "cert-file": ours.certificate, "key-file": ours.key}

    def opened(address, own):
        given = {"CA": ours.authority, "CERTIFICATE": own.certificate, "KEY": own.key}
        for name, path in given.items():
            monkeypatch.setenv(f"JAXDIST_ETCD_{name}", str(path))
        return open_rendezvous(address)

    with etcd_server(tmp_path, files) as (address, _):
        place = within(20, lambda: opened(address, ours))
        place.put("host/a", 1)
        assert place.names("host") == ["a"]
        with pytest.raises(RendezvousError, match="cannot be reached"):
            opened(address, other)
        with pytest.raises(RendezvousError, match="cannot be reached"):
            open_rendezvous(address.replace("etcds", "etcd"))


def within(seconds, attempt):
    """The result of the first attempt that reaches the server."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_files_of_tls_that_are_not_there(monkeypatch):
    for name in ("CA", "CERTIFICATE", "KEY"):
        monkeypatch.setenv(f"JAXDIST_ETCD_{name}", f"/nowhere/{name}")
    with pytest.raises(ConfigError, match=r"/nowhere/CA, .* cannot be used: .*No such file"):
        open_rendezvous("etcds://node1:2379")


def test_a_directory_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RendezvousError, match=r"file/meet cannot be reached: Not a directory"):
        open_rendezvous(str(tmp_path / "file" / "meet"))


def test_a_directory_that_went_away(tmp_path: Path):
    place = open_rendezvous(str(tmp_path / "meet"))
    token = place.token()
    shutil.rmtree(tmp_path / "meet")
    for asked in (
        place.token,
        lambda: place.compare_and_swap(token, "x"),
        lambda: place.put("host/a", 1),
    ):
        with pytest.raises(RendezvousError, match="cannot be reached"):
            asked()


def test_an_address_of_another_kind():
    with pytest.raises(
        ConfigError, match="directory that all hosts share, redis://HOST:PORT, or etcd"
    ):
        open_rendezvous("zookeeper://node1")


def copying(old: Path, new: Path) -> None:
    """As a file system over an object store renames."""
    if Path(old).is_dir():
        shutil.copytree(old, new, dirs_exist_ok=True)
        shutil.rmtree(old)
        return
    Path(new).write_text("")
    shutil.copyfile(old, new)
    os.unlink(old)


def keeping(old: Path, new: Path) -> None:
    """Leaves the old name where it was."""
    if Path(old).is_dir():
        raise OSError("directory")
    shutil.copyfile(old, new)


@pytest.mark.parametrize(
    ("rename", "words"),
    [(copying, "replaces another directory that has files|briefly"),
     (keeping, "does not replace that file")],
)  # fmt: skip
def test_a_directory_without_atomic_rename_is_refused(tmp_path, monkeypatch, rename, words):
    monkeypatch.setattr(folder_module.os, "rename", rename)
    monkeypatch.setattr(folder_module.os, "replace", rename)
    with pytest.raises(RendezvousError, match=f"has no atomic rename .*({words})"):
        open_rendezvous(str(tmp_path / "meet"))
    assert os.listdir(tmp_path / "meet") == []


def test_a_file_that_is_torn_while_it_is_replaced_is_seen(tmp_path, monkeypatch):
    """Nothing else is wrong with it."""
    monkeypatch.setattr(folder_module.os, "replace", copying)
    assert "briefly" in (folder_module._while_read(tmp_path) or "")
