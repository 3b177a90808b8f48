"""What hosts that meet are told: who is awaited, who differs, whose clock and token are others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis_place import redis_server

from jaxdist.checkpoint.identity import Identity, write_identity
from jaxdist.elastic.assignment import Assignment
from jaxdist.elastic.hosts import identity, start
from jaxdist.elastic.hosts.join import LOOK_SECONDS, Here
from jaxdist.elastic.hosts.leader_election import boot_clock
from jaxdist.elastic.hosts.multi_host import MultiHost
from jaxdist.elastic.hosts.rendezvous.address import open_rendezvous
from jaxdist.elastic.hosts.start import agent_of, local_device_count, read_host_token, split_host
from jaxdist.errors import ConfigError, RunError
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.runtime.gpus import Seen

LEASE = {"lease_seconds": 2.0, "settle_seconds": 0.05}
VALUES = {"train": {"batch_size": 8, "steps": 5}}
TOKEN = b"0123456789abcdef"


class Meeting:
    """Hosts of one process, closed at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.said = folder, stack, []

    def host(self, name: str, *, least: int = 1, seconds: float = 20.0, **given: Any) -> MultiHost:
        rendezvous = open_rendezvous(given.pop("address", str(self.folder / "meet")))
        config = MembershipConfig(min_hosts=least, max_hosts=4, **LEASE)
        token, values = given.pop("token", TOKEN), given.pop("values", VALUES)
        here = Here(f"{name}-1", name, "127.0.0.1", 1, 1, token)
        name_of = rendezvous.token().partition(".")[0]
        compatibility = identity.compatibility(values, {"--min": least}, name, name_of, token)
        (self.folder / name).mkdir(exist_ok=True)
        made = MultiHost(
            rendezvous, config, here, compatibility, values, self.said.append,
            seconds=seconds, resume=False, **given,
        )  # fmt: skip
        self.stack.callback(made.close)
        return made

    def begin(self, *hosts: MultiHost) -> list[Assignment | None]:
        """What each is told, at the same time."""
        found: dict[int, Assignment | None] = {}

        def one(at: int, host: MultiHost) -> None:
            found[at] = host.begin(self.folder / host.here.name, lambda: False)

        threads = [threading.Thread(target=one, args=given) for given in enumerate(hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[at] for at in range(len(hosts))]


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    with ExitStack() as stack:
        yield Meeting(tmp_path, stack)


@pytest.mark.full
def test_hosts_meet_whatever_their_clocks_show(meeting: Meeting):
    a = meeting.host("a", least=2)
    b = meeting.host("b", least=2, clock=lambda: boot_clock() - 1e6)
    parts = meeting.begin(a, b)
    assert {assignment.generation for assignment in parts if assignment} == {1}
    assert sorted((p.first, p.count, p.total) for p in parts if p) == [(0, 1, 2), (1, 1, 2)]
    assert len({assignment.coordinator for assignment in parts if assignment}) == 1
    assert len({assignment.fence for assignment in parts if assignment}) == 1
    time.sleep(1.5 * LEASE["lease_seconds"])  # it is renewed
    for host, assignment in zip((a, b), parts, strict=True):
        assert assignment is not None
        assert host.ends(assignment) is None


def test_too_few_hosts_are_waited_for_and_told(meeting: Meeting):
    words = (
        r"within 0.5 s: 2 of 3 hosts are missing, only a joined; start the agents of the missing"
    )
    with pytest.raises(RunError, match=words):
        meeting.host("a", least=3, seconds=0.5).begin(meeting.folder, lambda: False)


@pytest.mark.full
def test_who_is_awaited_is_said_now_and_then(meeting: Meeting, monkeypatch):
    monkeypatch.setattr("jaxdist.runtime.rendezvous.FIRST_WORD_SECONDS", 1.0)
    with pytest.raises(RunError):
        meeting.host("a", least=3, seconds=2.0).begin(meeting.folder, lambda: False)
    assert meeting.said
    assert re.search(r"waiting at .*meet for hosts: 1 of 3 have joined \(a\)", meeting.said[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"values": {"train": {"batch_size": 8, "steps": 6}}},
         r"this host, b, differs from a at .*: config train.steps: 6 here, 5 there\. Make the two"),
        pytest.param({"least": 2}, r"differs from a at .*: --min: 2 here, 1 there",
                     marks=pytest.mark.full),
        ({"token": b"another-token-16"},
         r"the token of this host, b, differs from the token of a at .*: give all hosts the same"),
    ],
)  # fmt: skip
def test_a_host_that_differs_is_refused_and_the_others_go_on(meeting: Meeting, given, words):
    a = meeting.host("a")
    (assignment,) = meeting.begin(a)
    assert assignment is not None
    with pytest.raises(ConfigError, match=words):
        meeting.host("b", **given).begin(meeting.folder / "b", lambda: False)
    time.sleep(4 * LEASE["settle_seconds"])
    assert a.ends(assignment) is None


@pytest.mark.full
def test_another_jaxdist_or_jax_is_refused(meeting: Meeting, monkeypatch):
    a = meeting.host("a")
    meeting.begin(a)
    true = identity.environment.versions
    monkeypatch.setattr(
        identity.environment, "versions", lambda names: {**true(names), "jax": "0.9.9"}
    )
    monkeypatch.setattr(identity, "code_digest", lambda: "another")
    words = r"version of jax: 0\.9\.9 here, \S+ there; code of jaxdist: another here, \w+ there"
    with pytest.raises(ConfigError, match=words):
        meeting.host("b").begin(meeting.folder / "b", lambda: False)


@pytest.fixture
def ended(meeting: Meeting) -> Identity:
    """A run that one host has brought to its end."""
    a = meeting.host("a")
    (assignment,) = meeting.begin(a)
    assert assignment is not None
    assert assignment.run is not None
    assert assignment.run.path is None
    run = replace(assignment.run, path=meeting.folder / "gpt")
    (meeting.folder / "gpt").mkdir()
    write_identity(meeting.folder / "gpt", run)
    RunFolder(meeting.folder / "a", assignment.generation).tell_run(run)
    RunFolder(meeting.folder / "a", assignment.generation).done.touch()
    assert a.over(assignment)
    a.close()
    return run


def test_a_host_that_comes_after_the_end_trains_nothing_again(meeting: Meeting, ended: Identity):
    assert meeting.begin(meeting.host("b")) == [None]
    assert re.fullmatch(
        rf"run {ended.path} of the rendezvous \S+ has finished, so nothing is trained.*",
        meeting.said[-1],
    )


@pytest.mark.parametrize("change", ["another config", "the directory is gone", "another run"])
@pytest.mark.every(3)
def test_a_host_that_comes_after_the_end_of_another_run_begins(
    meeting: Meeting, ended: Identity, change: str
):
    """With another config, or where what was trained is not there any more."""
    values, folder = VALUES, meeting.folder / "gpt"
    if change == "another config":
        values = {"train": {"batch_size": 8, "steps": 6}}
    else:
        (folder / "run.json").unlink()
        if change == "another run":
            write_identity(folder, Identity("a2"))
    (assignment,) = meeting.begin(meeting.host("b", values=values))
    assert assignment is not None
    assert assignment.run is not None
    assert (assignment.run.id != ended.id, assignment.resume) == (True, False)


def test_a_later_generation_of_hosts_is_given_the_run_of_the_one_before(meeting: Meeting):
    a = meeting.host("a", least=1)
    (first,) = meeting.begin(a)
    assert first is not None
    assert first.run is not None
    a.release(first)  # its process died before it could tell the path
    (second,) = meeting.begin(a)
    assert second is not None
    assert (second.run, second.resume) == (first.run, False)
    run = replace(first.run, path=meeting.folder / "gpt")
    RunFolder(meeting.folder / "a", 0).tell_run(run)
    time.sleep(2 * LOOK_SECONDS)
    a.ends(second)
    a.release(second)
    (third,) = meeting.begin(a)
    assert third is not None
    assert (third.run, third.resume) == (run, True)


def test_hosts_that_waited_at_a_rendezvous_that_was_deleted_end_and_new_ones_meet(
    meeting: Meeting,
):
    """Nobody gave a token: it is the one that each rendezvous has drawn."""
    old = meeting.host("a", least=3)
    waiting = threading.Thread(target=lambda: ended.append(_refusal(old, meeting.folder / "a")))
    ended: list[str] = []
    waiting.start()
    while not (meeting.folder / "meet" / "host").is_dir():
        time.sleep(LOOK_SECONDS)
    # In one step: who waits may write a file while the folder is emptied.
    (meeting.folder / "meet").rename(meeting.folder / "deleted")
    parts = meeting.begin(
        *(meeting.host(name, least=2, token=b"drawn anew 16 by") for name in "bc")
    )
    assert [assignment.total for assignment in parts if assignment] == [2, 2]
    waiting.join()
    assert "has lost its content: stop all agents, and start them again with --resume" in ended[0]


def _refusal(host: MultiHost, folder: Path) -> str:
    with pytest.raises(RunError) as caught:
        host.begin(folder, lambda: False)
    return str(caught.value)


def test_a_host_of_a_rendezvous_that_was_deleted_is_told_so_and_not_of_a_token():
    here, there = (identity.compatibility({}, {}, host, host, host.encode()) for host in "ab")
    words = r"joined before the rendezvous meet was deleted .*: stop all agents.*--resume"
    with pytest.raises(ConfigError, match=words):
        identity.check_compatibility(here, there, "meet")


def test_hosts_that_ask_for_another_directory_are_not_given_the_run_of_the_ones_before(
    meeting: Meeting,
):
    """All had left before the end of a run, whose directory the rendezvous knows."""
    a = meeting.host("a")
    (first,) = meeting.begin(a)
    assert first is not None
    assert first.run is not None
    RunFolder(meeting.folder / "a", 0).tell_run(replace(first.run, path=meeting.folder / "gpt"))
    a.ends(first)
    a.close()
    (again,) = meeting.begin(meeting.host("b", values={**VALUES, "run": {"directory": "other"}}))
    assert again is not None
    assert again.run is not None
    assert (again.run.id != first.run.id, again.run.path, again.resume) == (True, None, False)


@pytest.mark.full
def test_where_all_are_gone_another_config_may_begin(meeting: Meeting):
    a = meeting.host("a")
    meeting.begin(a)
    a.close()
    (assignment,) = meeting.begin(meeting.host("b", values={"train": {"batch_size": 4}}))
    assert assignment is not None
    assert assignment.generation == 2


@pytest.mark.full
def test_a_rendezvous_that_goes_away_ends_the_lease_and_is_told(tmp_path: Path):
    with ExitStack() as stack, redis_server(tmp_path) as (address, process):
        meeting = Meeting(tmp_path, stack)
        a = meeting.host("a", address=address, seconds=2.0)
        (assignment,) = meeting.begin(a)
        assert assignment is not None
        process.kill()
        deadline = time.monotonic() + 20
        while a.ends(assignment) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "redis://127.0.0.1" in (a.ends(assignment) or "")
        a.release(assignment)
        with pytest.raises(RunError, match=r"redis://\S+ cannot be reached: .*tried for 2 s"):
            a.begin(meeting.folder / "a", lambda: False)


def test_a_mesh_that_cannot_be_ends_it_everywhere(meeting: Meeting):
    values = {"mesh": {"data": 1, "tensor": 4}, "train": {"batch_size": 8}}
    with pytest.raises(
        ConfigError, match=r"a: 1 hosts cannot continue\. with 1: the mesh .* needs a"
    ):
        meeting.host("a", values=values).begin(meeting.folder / "a", lambda: False)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.every(2)
def test_a_host_that_was_stuck_is_left_out_where_a_mesh_is_left(meeting: Meeting, tensor):
    """With fewer than --min or no mesh it takes part at once, and says so."""
    values = {**VALUES, "mesh": {"data": -1, "tensor": tensor}}
    a, b = hosts = [meeting.host(name, least=tensor, values=values) for name in "ab"]
    for host in hosts:  # the registry takes two for enough in any case
        host.members.config = host.members.election.config = host.config.model_copy(
            update={"min_hosts": 1, "settle_seconds": 0.5}
        )
    parts = meeting.begin(*hosts)
    assert [assignment.total for assignment in parts if assignment] == [2, 2]
    b.release(parts[1], "process 1 stands still", stuck=True)
    a.release(parts[0])
    if tensor == 1:
        (assignment,) = meeting.begin(a)
        assert assignment is not None
        assert (assignment.count, assignment.total) == (1, 1)
        assert b.members.take() is None
        assert meeting.said[-1].endswith("; hosts that wait in reserve: b")
    else:
        parts = meeting.begin(*hosts)
        assert [assignment.total for assignment in parts if assignment] == [2, 2]
        assert any("includes this host, b, although one" in one for one in meeting.said)


@pytest.fixture
def given(tmp_path: Path, monkeypatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("{elastic: {lease_seconds: 1.0}}")
    return {
        "rendezvous": "meet", "least": 1, "most": 2, "processes": 1, "host": "a/127.0.0.1",
        "token_file": None, "resume": False, "restarts": 3, "seconds": 1.0, "say": print,
        "fork_module": "jaxdist.cli.fork_server",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"least": 3}, "^--min 3 is above --max 2: lower --min, or raise --max"),
        ({"host": "/10.0.0.7"}, "--host '/10.0.0.7' is not NAME or NAME/ADDRESS"),
        ({"token_file": Path("nothing")}, "--token-file nothing cannot be read: No such file"),
        ({"rendezvous": "config.yaml/x"}, "cannot be reached: Not a directory"),
    ],
)
def test_what_an_agent_is_given_is_looked_at_first(given, changed, words):
    with pytest.raises((ConfigError, RunError), match=words):
        agent_of(Path("config.yaml"), [], **{**given, **changed})


def test_a_key_that_is_none_is_refused(given):
    Path("config.yaml").write_text("{elastic: {lease: 1.0}}")
    with pytest.raises(ConfigError, match="lease"):
        agent_of(Path("config.yaml"), [], **given)


def test_an_agent_goes_on_from_the_generations_of_its_run(given, tmp_path: Path):
    (tmp_path / "runs/config-2/generations/00000006").mkdir(parents=True)
    found = agent_of(Path("config.yaml"), [], **given)
    assert isinstance(found.hosts, MultiHost)
    assert found.hosts.members.election.before == 6


def test_names_tokens_and_devices(tmp_path: Path, monkeypatch):
    assert split_host("n1/::1") == ("n1", "::1")
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(RunError, match="has 3 bytes: use a token of at least 16"):
        read_host_token(tmp_path / "short")
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    assert read_host_token(tmp_path / "token") == TOKEN
    monkeypatch.setattr(start.os, "listdir", lambda path: ["accel0", "accel1", "null"])
    assert local_device_count({}, {}, 1) == 2
    assert local_device_count({}, {"JAX_PLATFORMS": "cpu"}, 1) == 1
    monkeypatch.setattr(start.os, "listdir", lambda path: ["null"])
    assert local_device_count({"mesh": {"data": 2}}, {}, 1) == 1


def test_the_processes_of_a_machine_divide_its_gpus(monkeypatch):
    monkeypatch.setattr(start, "look", lambda *_: Seen("n1", ("a", "b", "c", "d")))
    assert [local_device_count({}, {}, processes) for processes in (1, 2, 4)] == [4, 2, 1]
    assert local_device_count({"mesh": {"fake_devices": 3}}, {}, 2) == 3
    with pytest.raises(RunError, match=r"3 processes on n1 .* see the same 4 GPUs"):
        local_device_count({}, {}, 3)


def test_the_digest_of_the_code_covers_tables_of_data(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").touch()
    table = tmp_path / "table.toml"
    table.write_text("a = 1")
    monkeypatch.setattr(identity.jaxdist, "__file__", str(tmp_path / "__init__.py"))
    before = identity.code_digest()
    table.write_text("a = 2")
    assert identity.code_digest() != before
