"""What hosts meet at: a directory, a Redis server; and what is not fit for it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_place import free_port, redis_server

from jaxdist.elastic.hosts.rendezvous import folder as folder_module
from jaxdist.elastic.hosts.rendezvous.address import open_rendezvous
from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous, RendezvousError, Token
from jaxdist.elastic.hosts.rendezvous.redis_server import RedisRendezvous
from jaxdist.errors import ConfigError


@pytest.fixture(params=["folder", "redis"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "meet")
        return
    with redis_server(tmp_path) as (address, _):
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
    with pytest.raises(ConfigError, match="give a directory that all hosts see, or redis://"):
        open_rendezvous("etcd://node1")


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
    [(copying, "takes the place of another that has content|for a moment"),
     (keeping, "does not take its place")],
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
    assert "for a moment" in (folder_module._while_read(tmp_path) or "")
