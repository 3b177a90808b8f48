"""Agents of several hosts: who is lost, who comes back, who was stopped and goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_hosts import ELASTIC, Play, finish, kill, playing
from etcd_place import etcd_server
from redis_place import redis_server


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    with playing(tmp_path, mesh={"data": 2}) as found:
        yield found


def count_of(number: int):
    return lambda marks: marks[0]["count"] == number


def lost_and_back(play: Play, victim: int) -> None:
    """Two hosts of one process each; one is killed, and comes again."""
    hosts = [play.start("a", most=2)]
    play.wait(count_of(1))
    hosts.append(play.start("b", most=2))
    both = play.wait(count_of(2))
    assert both[0]["address"] == both[1]["address"]
    assert both[0]["address"].startswith("127.0.0.1:")
    assert [one["agent"] for one in both] == [host.pid for host in hosts]  # as they came
    assert "extra" in both[0]
    assert both[0]["extra"] == []
    step = 100 * both[0]["generation"]
    parts = [f"step_{step:08d}.{index}_of_2" for index in range(2)]
    play.wait_for(parts, both)  # each has a copy of what the other keeps
    kill(hosts[victim])
    (alone,) = play.wait(count_of(1))
    assert alone["agent"] == hosts[1 - victim].pid
    assert alone["resume"]
    assert alone["extra"] == ["mesh.data=1", "train.microbatches=2"]
    assert alone["parts"] == parts
    hosts.append(play.start("c", most=2))
    again = play.wait(count_of(2))
    assert [one["agent"] for one in again] == [hosts[1 - victim].pid, hosts[2].pid]
    kept = f"step_{100 * alone['generation']:08d}.0_of_1"
    # What else there is these have written since.
    now = f"step_{100 * again[0]['generation']:08d}"
    assert [[x for x in one["parts"] if now not in x] for one in again] == [[kept]] * 2
    numbers = [one["generation"] for one in (both[0], alone, again[0])]
    assert numbers == sorted(set(numbers))
    play.end()
    told = [finish(host) for host in (hosts[1 - victim], hosts[2])]
    assert [code for code, _ in told] == [0, 0], told
    lines = (play.folder / "elastic.jsonl").read_text().splitlines()
    assert {"begun", "ended"} <= {json.loads(line)["event"] for line in lines}


@pytest.mark.full
def test_the_first_host_is_lost_and_another_comes(play: Play):
    """It kept the registry, and was where processes meet."""
    lost_and_back(play, 0)


@pytest.mark.slow
def test_the_last_host_is_lost_and_another_comes(play: Play):
    lost_and_back(play, 1)


@pytest.mark.slow
@pytest.mark.parametrize("server", [redis_server, etcd_server])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_same_with_a_server_to_meet_at(tmp_path: Path, victim: int, server):
    with (
        server(tmp_path) as (address, _),
        playing(tmp_path, address, mesh={"data": 2}) as play,
    ):
        lost_and_back(play, victim)


@pytest.mark.slow
def test_a_stopped_agent_that_goes_on_ends_what_it_had(play: Play):
    """Its lease has run out, and others are at work: its processes are ended before it asks."""
    hosts = [play.start("a"), play.start("b")]
    both = play.wait(count_of(2))
    first = next(host for host in hosts if host.pid == both[0]["agent"])
    first.send_signal(signal.SIGSTOP)
    (alone,) = play.wait(count_of(1))
    os.kill(both[0]["pid"], 0)  # it lives, and is of no generation any more
    first.send_signal(signal.SIGCONT)
    again = play.wait(count_of(2))
    assert [one["agent"] for one in again] == [alone["agent"], first.pid]
    with pytest.raises(ProcessLookupError):
        os.kill(both[0]["pid"], 0)
    play.end()
    told = [finish(host) for host in hosts]
    assert [code for code, _ in told] == [0, 0], told


@pytest.mark.full
def test_a_lost_process_is_told_everywhere_and_all_begin_anew(play: Play):
    hosts = [play.start(name, least=2) for name in "ab"]
    both = play.wait(count_of(2))
    number = both[0]["generation"]
    os.kill(both[1]["pid"], signal.SIGKILL)
    again = play.wait(lambda marks: marks[0]["generation"] > number)
    assert again[0]["generation"] == number + 1
    assert {one["run"]["id"] for one in again} == {both[0]["run"]["id"]}
    # Of what only a person can mend all hosts are told, and none begins again.
    (play.folder / f"crash-{number + 1}-0").write_text("2")
    told = dict(zip((host.pid for host in hosts), map(finish, hosts), strict=True))
    assert [code for code, _ in told.values()] == [2, 2], told
    names = {host.pid: name for host, name in zip(hosts, "ab", strict=True)}
    assert (
        f"process 1 of 2 on {names[both[1]['agent']]} ended (signal SIGKILL)"
        in told[both[1]["agent"]][1]
    )
    loser = names[both[1]["agent"]]
    assert f"{loser}: process 1 ended (signal SIGKILL)" in told[both[0]["agent"]][1]
    assert all("error: " in out and "broken" in out for _, out in told.values()), told
    assert max(one["generation"] for one in play.marks()) == number + 1


@pytest.mark.full
def test_who_is_told_to_stop_leaves_and_the_others_go_on(play: Play):
    hosts = [play.start("a"), play.start("b")]
    play.wait(count_of(2))
    hosts[0].send_signal(signal.SIGTERM)
    (alone,) = play.wait(count_of(1))
    assert alone["agent"] == hosts[1].pid
    finish(hosts[0])
    play.end()
    assert finish(hosts[1])[0] == 0


@pytest.mark.slow
def test_a_rendezvous_is_used_again_for_the_next_run(play: Play):
    ids = set()
    for turn in range(2):
        values = {**play.values, "train": {"batch_size": 8, "steps": turn + 1}}
        hosts = [play.start(name, least=2, values=values) for name in "ab"]
        first = play.wait(lambda marks, turn=turn: marks[0]["generation"] > turn)
        assert not first[0]["resume"]
        play.end()
        told = [finish(host) for host in hosts]
        assert [code for code, _ in told] == [0, 0], told
        (play.folder / "end").unlink()
        assert first[0]["generation"] == turn + 1
        ids.add(first[0]["run"]["id"])
        late = finish(play.start("c", least=2, values=values))
        assert late[0] == 0, late
        assert "has finished, so nothing is trained" in late[1]
    assert len(ids) == 2


@pytest.mark.slow
def test_a_host_that_no_mesh_has_a_place_for_waits_and_takes_anothers(tmp_path: Path):
    """A batch of 8 does not divide over three."""
    with playing(tmp_path) as play:
        hosts = [play.start(name, least=2) for name in "ab"]
        both = play.wait(count_of(2))
        number = both[0]["generation"]
        hosts.append(play.start("c", least=2))
        again = play.wait(lambda marks: marks[0]["generation"] > number)
        assert len(again) == 2
        working = [one["agent"] for one in again]
        assert working == [one["agent"] for one in both]
        kill(hosts.pop([host.pid for host in hosts].index(working[1])))
        number = again[0]["generation"]
        last = play.wait(lambda marks: marks[0]["generation"] > number)
        assert [one["agent"] for one in last] == [working[0], hosts[-1].pid]
        play.end()
        told = [finish(host) for host in hosts]
        assert [code for code, _ in told] == [0, 0], told
        assert "2 processes; hosts that wait in reserve: c" in "".join(out for _, out in told)


@pytest.mark.slow
def test_a_host_that_was_stuck_waits_and_comes_back(tmp_path: Path):
    elastic = {**ELASTIC, "stuck_host_seconds": 4.0}
    with playing(tmp_path, mesh={"data": 2}, elastic=elastic) as play:
        hosts = [play.start(name, most=2, step_seconds=1.5) for name in "ab"]
        both = play.wait(count_of(2))
        number = both[0]["generation"]
        (play.folder / f"stuck-{number}-1").touch()
        (alone,) = play.wait(count_of(1))
        assert (alone["generation"], alone["agent"]) == (number + 1, both[0]["agent"])
        again = play.wait(count_of(2))
        assert again[0]["generation"] == number + 2
        play.end()
        told = dict(zip((host.pid for host in hosts), map(finish, hosts), strict=True))
        assert [code for code, _ in told.values()] == [0, 0], told
        names = {host.pid: name for host, name in zip(hosts, "ab", strict=True)}
        on, words = names[both[1]["agent"]], told[both[1]["agent"]][1]
        assert f"this host, {on}, waits in reserve during generation {number + 1} for" in words
        assert "s, because one of its processes was stuck" in words
        plan = "1 hosts, 1 processes with mesh.data=1, train.microbatches=2; "
        assert f"{plan}hosts that wait in reserve: {on}" in told[both[0]["agent"]][1]


@pytest.mark.slow
def test_the_process_that_others_on_other_hosts_wait_for_is_named(play: Play):
    """Each agent sees its own process stand still; only one of them is behind."""
    hosts = [play.start(name, least=2, step_seconds=2.0) for name in "ab"]
    both = play.wait(count_of(2))
    number = both[0]["generation"]
    (play.folder / f"stuck-{number}-1").touch()
    again = play.wait(lambda marks: marks[0]["generation"] > number)
    assert again[0]["generation"] == number + 1
    play.end()
    told = dict(zip((host.pid for host in hosts), map(finish, hosts), strict=True))
    assert [code for code, _ in told.values()] == [0, 0], told
    names = {host.pid: name for host, name in zip(hosts, "ab", strict=True)}
    on = names[both[1]["agent"]]
    assert (
        f"process 1 of 2 on {on} has been in phase input_wait after step"
        in told[both[1]["agent"]][1]
    )
    # Two of two are needed: it takes part again at once.
    taken = f"includes this host, {on}, although one of its processes was stuck"
    assert taken in told[both[1]["agent"]][1]
    other = told[both[0]["agent"]][1]
    assert f"{on}: process 1 has been in phase input_wait after step" in other
    lines = map(json.loads, (play.folder / "elastic.jsonl").read_text().splitlines())
    (stuck,) = (one for one in lines if one["event"] == "stuck")
    assert (stuck["process"], stuck["host"]) == (1, on)
