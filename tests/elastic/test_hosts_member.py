"""A host's side: nothing is given back before the agent has said that its processes are gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdist.elastic.hosts.leader_election import LeaderElection
from jaxdist.elastic.hosts.member import Membership
from jaxdist.elastic.hosts.messages import HostMessages
from jaxdist.elastic.hosts.rendezvous.contract import RendezvousError
from jaxdist.elastic.hosts.rendezvous.folder import FolderRendezvous
from jaxdist.heartbeat.config import MembershipConfig

CONFIG = MembershipConfig(min_hosts=1, max_hosts=2, lease_seconds=10.0, settle_seconds=0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def member(folder: Path, name: str, clock: Clock) -> Membership:
    place = FolderRendezvous(folder)
    election = LeaderElection(place, CONFIG, name, {}, clock=clock)
    return Membership(place, CONFIG, name, election, clock)


def turns(*members: Membership) -> None:
    for _ in range(3):
        for one in members:
            one.clock.now += 0.1
            one.turn()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Membership, Membership, Clock]:
    clock = Clock()
    a, b = member(tmp_path, "a", clock), member(tmp_path, "b", clock)
    for one in (a, b):
        one.name = FolderRendezvous(tmp_path).token().split(".")[0]
    return a, b, clock


def test_a_generation_that_was_ended_is_given_back_by_the_agent_alone(pair):
    a, b, _ = pair
    turns(a)
    first = a.take()
    assert first is not None
    assert first.members == ("a",)
    assert a.ends() is None
    assert not a.pauses
    turns(a, b)  # b came: a is to end the generation when it has saved
    assert a.ends() is None
    assert a.pauses
    turns(a, b)
    assert b.take() is None  # the processes of a may still be there
    a.release()
    turns(a, b)
    found = b.take()
    assert found is not None
    assert found.members == ("a", "b")
    assert a.take() == found
    assert not a.pauses


def test_a_generation_that_lost_a_host_ends_with_this_reason(pair):
    a, b, _ = pair
    turns(a)
    a.take()
    turns(a, b)
    a.release()
    turns(a, b)
    assert a.take() == b.take()
    b.say(leaves=True)
    turns(a)
    messages = HostMessages(a, "a", 1.0)
    assert messages.why(SimpleNamespace(generation=2), a.ends()) == "a host was lost or has joined"


def test_processes_are_ended_before_the_lease_is(pair):
    a, _, clock = pair
    turns(a)
    a.take()
    clock.now += 0.85 * CONFIG.lease_seconds
    assert a.ends() is None
    clock.now += 0.1 * CONFIG.lease_seconds
    assert a.ends() == "the lease of this host expired"
    turns(a)
    assert a.ends() is None  # it was renewed in time


def test_the_end_of_the_run_is_told_and_that_of_a_former_run_is_not(pair):
    a, b, _ = pair
    turns(a)
    a.finish(3, 2, "broken")
    b.turn()
    assert b.over == {"generation": 3, "code": 2, "words": "broken"}
    assert a.over == b.over


def test_a_rendezvous_that_was_emptied_is_seen(pair, tmp_path: Path):
    a, _, _ = pair
    a.name = "another"
    said, token = a.rendezvous.get("host/a"), a.rendezvous.token()
    with pytest.raises(RendezvousError, match="has lost its content: stop all agents, and start"):
        a.turn()
    # What others have made anew is theirs: it neither says anything there nor keeps the registry.
    assert (a.rendezvous.get("host/a"), a.rendezvous.token()) == (said, token)
