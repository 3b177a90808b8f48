"""Generations on leases: whatever the network and the clocks do, never two are at work."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import Document, validate
from jaxdist.elastic.membership import Grant, Host, Registry, Renew, Stop
from jaxdist.elastic.quarantine import Fits, all_fit
from jaxdist.errors import ConfigError
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.heartbeat.fence import Fence

CONFIG = MembershipConfig(
    min_hosts=2, max_hosts=3, lease_seconds=10.0, settle_seconds=2.0, drift=0.1
)


class World:
    """Hosts, a registry and what is between them, in true time.

    Each clock has an offset and a rate of its own, within the drift that is allowed.
    """

    def __init__(self, seed: int, config: MembershipConfig = CONFIG) -> None:
        self.random = random.Random(seed)
        self.config, self.now = config, 0.0
        self.registry, self.hosts = Registry(), {}
        self.clocks = {"registry": self.clock()}
        self.under_way = []  # (to, message)
        self.fence, self.begun = Fence(), 0
        self.fits = self.random.choice((all_fit, lambda hosts: len(hosts) != 2))

    def clock(self) -> tuple[float, float]:
        drift = self.config.drift
        return self.random.uniform(-1e6, 1e6), self.random.choice((1 - drift, 1, 1 + drift))

    def time(self, who: str) -> float:
        offset, rate = self.clocks[who]
        return offset + rate * self.now

    def join(self) -> None:
        self.begun += 1
        name = f"host {self.begun}"
        self.hosts[name], self.clocks[name] = Host(name), self.clock()

    def say(self, name: str) -> None:
        host = self.hosts[name]
        if host.pauses and self.random.random() < 0.5:  # it has saved, and stops
            assert host.generation is not None
            self.hosts[name] = host.stop(host.generation.number + 1)
        message = self.hosts[name].renew(self.time(name))
        self.under_way.append(("registry", message))

    def leave(self, name: str) -> None:
        host = self.hosts.pop(name)
        host = host.stop(1 + (host.generation.number if host.generation else 0))
        self.under_way.append(("registry", host.renew(self.time(name), leaves=True)))

    def deliver(self, at: int) -> None:
        to, message = self.under_way[at]
        if isinstance(message, Renew):
            now = self.time("registry")
            before = self.registry
            self.registry, answer = before.receive(self.config, now, message, self.fits)
            if self.registry.generation != before.generation:
                self.check_begun()
            self.under_way.append((message.host, answer))
        elif to in self.hosts:
            self.hosts[to] = self.hosts[to].hear(self.config, message)

    def restart(self) -> None:
        """The registry dies and reads its state back; its clock is another one."""
        self.clocks["registry"] = self.clock()
        self.registry = self.registry.restarted(self.config, self.time("registry"))

    def at_work(self) -> dict[str, object]:
        found = {name: host.at_work(self.time(name)) for name, host in self.hosts.items()}
        return {name: generation for name, generation in found.items() if generation}

    def check(self) -> None:
        working = self.at_work()
        generations = set(working.values())
        assert len(generations) <= 1, working
        for generation in generations:
            assert set(working) <= set(generation.members)
            assert len(generation.members) == len(set(generation.members))
            assert self.config.min_hosts <= len(generation.members) <= self.config.max_hosts
            assert generation.number <= self.registry.generation.number
            # All that is at work may write; what was deposed may not.
            fence = self.fence.admit(generation.number)
            assert fence is not None
            self.fence = fence

    def check_begun(self) -> None:
        """Who asks to be left out takes part only where the others cannot without it."""
        known = self.registry
        ready = [host for host in known.alive if host not in known.quarantined]
        enough = len(ready) >= self.config.min_hosts
        enough = enough and self.fits(ready[: self.config.max_hosts])
        hosts = ready if enough else [*known.alive]
        assert known.generation.members == (*hosts[: self.config.max_hosts],)

    def get_stuck(self, name: str) -> None:
        host = self.hosts[name].was_stuck(self.config, self.time(name))
        number = host.generation.number if host.generation else 0
        self.hosts[name] = host.stop(number + 1)

    def calm(self, seconds: float) -> None:
        """Nothing is lost, and all ask each second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for name in self.hosts:
                self.say(name)
            while self.under_way:
                self.deliver(0)
                self.under_way.pop(0)
            self.check()


EVENTS = ("say", "say", "say", "deliver", "deliver", "deliver", "double", "lose", "time", "jump")
RARE = ("join", "die", "leave", "restart", "stuck")


def run(world: World, events: list[tuple[str, int]], *, restarts: bool = True) -> None:
    for event, value in events:
        names = sorted(world.hosts)
        match event:
            case "say" if names:
                world.say(names[value % len(names)])
            case "deliver" | "double" | "lose" if world.under_way:
                at = value % len(world.under_way)
                if event != "lose":
                    world.deliver(at)
                if event != "double":
                    world.under_way.pop(at)
            case "time":
                world.now += 0.01 * value
            case "jump":
                world.now += 0.2 * value
            case "join" if len(names) < 6:
                world.join()
            case "die" if names:
                del world.hosts[names[value % len(names)]]
            case "leave" if names:
                world.leave(names[value % len(names)])
            case "stuck" if names:
                world.get_stuck(names[value % len(names)])
            case "restart" if restarts:
                world.restart()
        world.check()


PLAYS = st.lists(
    st.tuples(st.sampled_from(EVENTS + RARE), st.integers(0, 99)), min_size=20, max_size=150
)


@settings(max_examples=150)
@given(PLAYS, st.integers(0, 999), st.integers(0, 5))
def test_never_are_two_generations_at_work(events, seed, hosts):
    world = World(seed)
    for _ in range(hosts):
        world.join()
    world.calm(12.0)
    run(world, events)


STORM = MembershipConfig(
    min_hosts=2, max_hosts=4, lease_seconds=10.0, settle_seconds=0.0, drift=0.3,
    stuck_host_seconds=15.0,
)  # fmt: skip
TICK_SECONDS = 0.25


def storm(world: World, ticks: int) -> int:
    """Hosts ask often; messages are late, lost and doubled, hosts are cut off for a while, die,
    leave and come, the registry restarts. Returns how many generations were at work."""
    dice, cut, seen = world.random, {}, set()
    for _ in range(ticks):
        world.now += TICK_SECONDS
        if len(world.hosts) < 5 and dice.random() < 0.05:
            world.join()
        for name in sorted(world.hosts):
            if dice.random() < 0.01:
                cut[name] = world.now + dice.uniform(2, 25)
            if dice.random() < 0.6:
                world.say(name)
            if dice.random() < 0.003:
                world.get_stuck(name)
            if dice.random() < 0.003:
                (world.leave if dice.random() < 0.5 else world.hosts.pop)(name)
        if dice.random() < 0.01:
            world.restart()
        for at in reversed(range(len(world.under_way))):
            to, message = world.under_way[at]
            host = message.host if isinstance(message, Renew) else to
            chance = dice.random()
            if cut.get(host, 0.0) > world.now and chance < 0.97:
                continue  # it may come much later
            if chance < 0.7:
                world.deliver(at)
            if chance < 0.6 or chance > 0.9:  # else it comes again
                world.under_way.pop(at)
            world.check()
        seen |= {generation.number for generation in world.at_work().values()}
    return len(seen)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.every(3)
def test_storms_and_the_calm_after(seed):
    """Many generations work, never two at once; then all that may work do, in one."""
    world = World(seed, STORM)
    assert storm(world, 1500) > 3
    while len(world.hosts) < 2:
        world.join()
    world.under_way.clear()
    world.calm(60.0)
    working = world.at_work()
    assert len(working) == min(len(world.hosts), STORM.max_hosts)
    (generation,) = set(working.values())
    assert set(generation.members) == set(working)


def test_shrink_replace_and_grow():
    world = World(0, CONFIG.model_copy(update={"drift": 0.0}))
    for _ in range(4):
        world.join()
    world.calm(10.0)
    (first,) = set(world.at_work().values())
    assert first.members == ("host 1", "host 2", "host 3")  # host 4 waits
    del world.hosts["host 1"]
    world.calm(30.0)
    (second,) = set(world.at_work().values())
    assert second.members == ("host 2", "host 3", "host 4")
    assert second.coordinator == "host 2"
    del world.hosts["host 3"]
    world.calm(30.0)
    (third,) = set(world.at_work().values())
    assert third.members == ("host 2", "host 4")
    del world.hosts["host 4"]
    world.calm(30.0)
    assert not world.at_work()  # fewer than min_hosts
    world.join()
    world.join()
    world.calm(30.0)
    (last,) = set(world.at_work().values())
    assert last.members == ("host 2", "host 5", "host 6")
    assert first.number < second.number < third.number < last.number


def test_a_generation_that_could_grow_goes_on_until_it_stops_itself():
    world = World(0, CONFIG.model_copy(update={"max_hosts": 4}))
    for _ in range(2):
        world.join()
    world.calm(10.0)
    (first,) = set(world.at_work().values())
    world.random.random = lambda: 1.0  # nobody stops
    world.join()
    world.calm(40.0)
    assert set(world.at_work().values()) == {first}
    assert all(world.hosts[name].pauses for name in first.members)
    world.random.random = lambda: 0.0
    world.calm(3.0)
    (second,) = set(world.at_work().values())
    assert second.members == (*first.members, "host 3")
    assert not any(host.pauses for host in world.hosts.values())


def members_of(world: World) -> tuple[str, ...]:
    found = set(world.at_work().values())
    assert len(found) <= 1
    return next((generation.members for generation in found), ())


def stuck_world(fits: Fits = all_fit, **changed: float) -> World:
    """Three hosts at work, and the second was just stuck."""
    world = World(0, CONFIG.model_copy(update={"drift": 0.0, "max_hosts": 4, **changed}))
    world.fits = fits
    for _ in range(3):
        world.join()
    world.calm(10.0)
    assert members_of(world) == ("host 1", "host 2", "host 3")
    world.get_stuck("host 2")
    world.calm(5.0)
    return world


def test_a_host_that_was_stuck_is_left_out_for_a_while():
    world = stuck_world(stuck_host_seconds=60.0)
    assert members_of(world) == ("host 1", "host 3")
    world.restart()  # and it is not forgotten
    world.calm(40.0)
    assert members_of(world) == ("host 1", "host 3")
    world.calm(30.0)
    assert set(members_of(world)) == {"host 1", "host 2", "host 3"}


def test_another_takes_its_place():
    world = World(0)
    for _ in range(4):
        world.join()
    world.calm(10.0)
    assert members_of(world) == ("host 1", "host 2", "host 3")
    world.get_stuck("host 2")
    world.calm(20.0)
    assert members_of(world) == ("host 1", "host 3", "host 4")


@pytest.mark.parametrize(
    ("fits", "changed"),
    [(all_fit, {"min_hosts": 3}), (lambda hosts: len(hosts) == 3, {}),
     (all_fit, {"stuck_host_seconds": 0.0})],
)  # fmt: skip
def test_where_the_others_cannot_go_on_without_it_it_takes_part(fits, changed):
    world = stuck_world(fits, **changed)
    assert set(members_of(world)) == {"host 1", "host 2", "host 3"}


def test_who_was_left_out_is_taken_when_another_is_lost():
    world = stuck_world()
    assert members_of(world) == ("host 1", "host 3")
    del world.hosts["host 3"]
    world.calm(30.0)
    assert members_of(world) == ("host 1", "host 2")


def test_who_leaves_is_not_waited_for():
    world = World(0)
    for _ in range(3):
        world.join()
    world.calm(10.0)
    (before,) = set(world.at_work().values())
    world.leave("host 2")
    world.calm(5.0)  # less than a lease
    (after,) = set(world.at_work().values())
    assert (after.number, after.members) == (before.number + 1, ("host 1", "host 3"))


def test_a_deposed_host_is_told_by_its_token():
    world = World(0)
    for _ in range(3):
        world.join()
    world.calm(10.0)
    cut = world.hosts.pop("host 1")  # cut off, not dead
    world.calm(30.0)
    number = world.registry.generation.number
    renewal = cut.renew(world.time("host 1"))
    _, answer = world.registry.receive(CONFIG, world.time("registry"), renewal)
    assert answer == Stop(number)
    told = cut.hear(CONFIG, answer)
    assert told.generation is None
    assert told.stopped == number - 1
    # A grant from before, that was late, brings nothing back.
    late = Grant(cut.generation, world.time("host 1"))
    assert told.hear(CONFIG, late) == told
    assert Fence(number).admit(cut.generation.number) is None


def test_more_hosts_at_least_than_at_most():
    with pytest.raises(ConfigError, match="min_hosts 4 is above max_hosts 3: lower min_hosts"):
        validate(Document({"min_hosts": 4, "max_hosts": 3}), MembershipConfig)
