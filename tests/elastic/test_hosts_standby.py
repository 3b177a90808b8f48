"""A host in no generation: how long it waits, and what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.elastic.hosts.leader_election import encode_registry
from jaxdist.elastic.hosts.messages import HostMessages
from jaxdist.elastic.hosts.rendezvous.contract import RendezvousError
from jaxdist.elastic.hosts.standby import Standby
from jaxdist.elastic.membership import Generation, Registry
from jaxdist.errors import RunError
from jaxdist.runtime.rendezvous import Wait


class Play:
    """Host b, whose registry and clock a test has in its hands."""

    def __init__(self, quarantined_seconds: float = 0.0) -> None:
        self.now, self.registry, self.said = 100.0, Registry(), []
        self.members: Any = SimpleNamespace(
            own="b",
            trouble=None,
            quarantined_seconds=quarantined_seconds,
            rendezvous=self,
            config=SimpleNamespace(lease_seconds=10.0),
        )
        words: Any = SimpleNamespace(
            name="B", seconds=30.0, too_few=lambda: "too few", tell_wait=lambda wait: None
        )
        self.standby = Standby(self.members, words, self.said.append, lambda: self.now)

    def names(self, kind: str) -> list[str]:
        return ["3"]

    def get(self, name: str) -> Any:
        return {"registry": encode_registry(self.registry)}

    def work(self, *members: str) -> None:
        self.registry = Registry(generation=Generation(7, members), granted=True)

    def wait(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.now += 0.25
            self.standby.look()


def test_where_nobody_is_at_work_the_wait_has_an_end():
    play = Play()
    play.wait(29)
    with pytest.raises(RunError, match="too few"):
        play.wait(2)


def test_beside_others_at_work_it_has_none():
    play = Play()
    play.work("a")
    play.wait(19)
    assert play.said == []  # its hosts may have been lost just now
    play.wait(100)
    assert play.said == ["this host, B, waits in reserve during generation 7"]
    play.registry = Registry()
    play.wait(29)
    with pytest.raises(RunError, match="too few"):
        play.wait(2)


def test_a_generation_that_this_host_lacks_or_that_is_not_told_is_no_others(monkeypatch):
    play = Play()
    play.work("a", "b")  # it is to take it up
    with pytest.raises(RunError, match="too few"):
        play.wait(31)
    play = Play()
    play.work("a")
    play.members.trouble = RendezvousError("gone")
    with pytest.raises(RunError, match="too few"):
        play.wait(31)


def test_a_host_that_was_stuck_says_where_it_is():
    play = Play(quarantined_seconds=300.0)
    play.work("a")
    play.wait(2)
    told = (
        "this host, B, waits in reserve during generation 7 for 300 s, because one of its "
        "processes was stuck"
    )
    assert play.said == [told]
    play.standby.taken(Generation(8, ("a", "b")))
    assert play.said[1].startswith("generation 8 includes this host, B, although one")
    Play().standby.taken(Generation(8, ("b",)))


def test_what_is_in_the_way_is_said_while_it_is():
    said: list[str] = []
    members: Any = SimpleNamespace(trouble=RendezvousError("the rendezvous meet cannot be reached"))
    wait = Wait(30.0, said.append, iter((0.0, 25.0, 25.0, 25.0)).__next__)
    HostMessages(members, "B", 30.0).tell_wait(wait)
    assert said == ["waiting: the rendezvous meet cannot be reached"]
