"""Leaders of the registry are elected, and paused at any moment: never do two grant leases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.elastic.hosts.leader_election import (
    LeaderElection,
    compatibility_of,
    decode_answer,
    decode_registry,
    encode_answer,
    encode_registry,
    encode_renewal,
)
from jaxdist.elastic.hosts.rendezvous.contract import NOBODY, Rendezvous, RendezvousError, Token
from jaxdist.elastic.membership import Generation, Grant, Host, Registry, Stop
from jaxdist.heartbeat.config import MembershipConfig

CONFIG = MembershipConfig(
    min_hosts=1, max_hosts=4, lease_seconds=10.0, settle_seconds=1.0, drift=0.1
)


class Memory(Rendezvous):
    """A rendezvous in a dictionary."""

    address = "memory"

    def __init__(self) -> None:
        self.kept, self.now = {}, str(Token("r"))

    def token(self):
        return self.now

    def compare_and_swap(self, seen, new):
        if self.now != seen:
            return False
        self.now = new
        return True

    def put(self, name, value):
        self.kept[name] = value

    def get(self, name):
        return self.kept.get(name)

    def names(self, kind):
        return sorted(k.split("/")[1] for k in self.kept if k.startswith(f"{kind}/"))

    def drop(self, name):
        self.kept.pop(name, None)


class World:
    """Hosts that each have a clock of its own, and keep the registry in phases, one at a time."""

    def __init__(self, seed: int) -> None:
        self.random, self.true = random.Random(seed), 0.0
        self.place = Memory()
        self.hosts, self.elections, self.clocks = {}, {}, {}
        self.numbers, self.phase = {}, {}
        self.begun, self.granted = 0, set()

    def join(self) -> None:
        self.begun += 1
        name = f"h{self.begun}"
        drift = CONFIG.drift
        self.clocks[name] = (
            self.random.uniform(-1e5, 1e5), self.random.choice((1 - drift, 1, 1 + drift))
        )  # fmt: skip
        self.hosts[name], self.numbers[name], self.phase[name] = Host(name), 0, "look"
        self.elections[name] = LeaderElection(
            self.place, CONFIG, name, {}, clock=lambda: self.time(name)
        )

    def time(self, name: str) -> float:
        offset, rate = self.clocks[name]
        return offset + rate * self.true

    def say(self, name: str) -> None:
        self.numbers[name] += 1
        host = self.hosts[name]
        if host.pauses:  # it has saved, and stops
            assert host.generation is not None
            self.hosts[name] = host.stop(host.generation.number + 1)
        told = encode_renewal(self.hosts[name].renew(self.time(name)), self.numbers[name], {})
        self.place.put(f"host/{name}", told)

    def hear(self, name: str) -> None:
        told = self.place.get(f"answer/{name}")
        if told is not None:
            self.hosts[name] = self.hosts[name].hear(CONFIG, decode_answer(told))

    def keep(self, name: str) -> None:
        """One phase of a leader's turn: between two of them it may be stopped for as long."""
        election, phase = self.elections[name], self.phase[name]
        if phase == "look":
            if election.term is None:
                election.look()
            following = "collect" if election.term is not None else "look"
        elif phase == "collect":
            election.collect()
            following = "commit"
        elif phase == "commit":
            following = "answer" if election.commit() else "look"
        else:
            election.answer()
            following = "look"
        self.phase[name] = following

    def check(self) -> None:
        working = {}
        for name, host in self.hosts.items():
            generation = host.at_work(self.time(name))
            if generation is not None:
                working[name] = generation
                assert name in generation.members
        assert len({generation.number for generation in working.values()}) <= 1, working
        assert len(set(working.values())) <= 1, working
        self.granted |= {generation.number for generation in working.values()}

    def calm(self, seconds: float) -> None:
        end = self.true + seconds
        while self.true < end:
            self.true += 0.5
            for name in self.hosts:
                self.say(name)
                while True:
                    self.keep(name)
                    if self.phase[name] in ("look", "collect"):
                        break
                self.hear(name)
            self.check()


EVENTS = ("say", "say", "hear", "hear", "keep", "keep", "keep", "keep", "time", "jump", "long")


@pytest.mark.full
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from((*EVENTS, "join", "die")), st.integers(0, 99)),
        min_size=30, max_size=200,
    ),
    st.integers(0, 999),
)  # fmt: skip
def test_never_two_generations_whatever_elections_do(events, seed):
    world = World(seed)
    for _ in range(3):
        world.join()
    world.calm(25.0)
    for event, value in events:
        names = sorted(world.hosts)
        name = names[value % len(names)] if names else ""
        match event:
            case "say" | "hear" | "keep" if names:
                getattr(world, event)(name)
            case "time":
                world.true += 0.01 * value
            case "jump":
                world.true += 0.1 * value
            case "long":
                world.true += 8.1 + 0.1 * value
            case "join" if len(names) < 5:
                world.join()
            case "die" if names:
                for known in (world.hosts, world.elections, world.phase):
                    del known[name]
        world.check()


def storm(world: World, ticks: int) -> None:
    """Hosts are stopped in the midst of a turn, for longer than a lease, and go on there."""
    dice, stopped = world.random, {}
    for _ in range(ticks):
        world.true += 0.25
        if len(world.hosts) < 4 and dice.random() < 0.05:
            world.join()
        for name in sorted(world.hosts):
            if stopped.get(name, 0.0) > world.true:
                continue
            if dice.random() < 0.02:
                stopped[name] = world.true + dice.uniform(2, 40)
            if dice.random() < 0.002:
                for known in (world.hosts, world.elections, world.phase):
                    del known[name]
                continue
            for event in dice.sample(("say", "hear", "keep", "keep", "keep", "keep"), 5):
                getattr(world, event)(name)
                world.check()


@pytest.mark.parametrize("seed", range(8))
def test_leaders_in_a_storm_and_the_calm_after(seed):
    world = World(seed)
    for _ in range(3):
        world.join()
    storm(world, 1200)
    assert len(world.granted) > 3
    assert Token.parse(world.place.token()).term > 3
    world.calm(80.0)
    working = {host.at_work(world.time(name)) for name, host in world.hosts.items()}
    (generation,) = working
    assert generation is not None
    assert set(generation.members) == set(world.hosts)


def test_who_stays_away_is_followed_and_reads_back_where_generations_are():
    world = World(0)
    world.join()
    world.calm(10.0)
    (first,) = world.granted
    del world.hosts["h1"], world.elections["h1"], world.phase["h1"]
    world.join()
    world.calm(40.0)
    assert max(world.granted) > first
    assert Token.parse(world.place.token()).holder == "h2"


def test_who_asks_to_be_left_out_is_known_to_the_next_leader():
    known = Registry(alive={"a": 0.0, "b": 0.0}, quarantined=frozenset({"b"}))
    assert decode_registry(encode_registry(known)) == known


def test_a_leader_that_resigns_is_followed_at_once():
    world = World(0)
    world.join()
    world.calm(3.0)
    world.elections["h1"].resign()
    assert Token.parse(world.place.token()).holder == NOBODY
    assert compatibility_of(world.place) is None
    world.join()
    world.keep("h2")
    assert world.elections["h2"].term is not None


def test_generations_go_on_from_those_of_former_rendezvous():
    world = World(0)
    world.join()
    world.elections["h1"].before = 41
    world.calm(5.0)
    assert world.granted == {42}


def test_what_is_no_token():
    with pytest.raises(RendezvousError, match="'junk' is not the token of a rendezvous"):
        Token.parse("junk")


@pytest.mark.parametrize("message", [Stop(4), Grant(Generation(3, ("a", "b")), 1.5)])
def test_answers_come_as_they_were_sent(message):
    assert decode_answer(encode_answer(message)) == message
