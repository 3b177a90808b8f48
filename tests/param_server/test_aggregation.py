"""Racks between workers and the root: the same sums, fewer bytes at the root."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.param_server.aggregation import AggregationConfig, Direct, PushTraffic, Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrays import combined
from jaxdist.param_server.consistency.arrival import SSP
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.protocol import client, rack, server
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Apply,
    Drop,
    Pull,
    Push,
    Refuse,
    Stamp,
)
from jaxdist.param_server.protocol.server import RangeState

STEPS = 4


class Hierarchy:
    """Workers, aggregators and a root on a network that loses, copies and reorders."""

    def __init__(self, model, racks, seed, gradient, tokens):
        self.rng, self.model = random.Random(seed), model
        self.gradient, self.tokens = gradient, tokens
        self.rack_of = {worker: number for number, team in enumerate(racks) for worker in team}
        self.w, self.root = np.zeros(2), RangeState(Clocks(len(racks)))
        self.network, self.at_root, self.copies = [], Counter(), {}
        self.workers = {worker: client.ClientState(worker) for worker in self.rack_of}
        self.racks, self.payloads = {}, {}
        for number, team in enumerate(racks):
            self.racks[number] = rack.begin_rack(number, len(team))
            for worker in team:
                self.racks[number] = rack.join_rack(model, self.racks[number], worker).state
            self.root = server.join(model, self.root, number).state
        self.applied = []

    def send(self, *thing):
        if self.rng.random() > 0.1:
            self.network += [thing] * (2 if self.rng.random() < 0.2 else 1)

    def step(self):
        if self.network and self.rng.random() < 0.8:
            at = self.rng.randrange(len(self.network))
            where, *thing = self.network.pop(at)
            getattr(self, where)(*thing)
        elif self.rng.random() < 0.8:
            self.act(self.rng.choice([*self.workers]))
        else:
            number = self.rng.choice([*self.racks])
            for message in client.retries(self.racks[number].outer):
                self.up(number, message)

    def act(self, worker):
        state = self.workers[worker]
        if client.ready(BSP(), state) and state.clock < STEPS:
            change = self.gradient(self.copies[worker], worker, state.clock)
            state, message = client.push(state, tokens=self.tokens[worker])
            self.payloads[worker, message.stamp.sequence] = change
        elif not state.under_way and state.clock < STEPS:
            state, message = client.pull(state)
        self.workers[worker] = state
        for message in client.retries(state):
            self.send("rack_from_worker", self.rack_of[worker], message)

    def up(self, number, message):
        payload = self.payloads.get((number, message.stamp.sequence, "rack"))
        self.send("root_from_rack", message, payload)

    def rack_from_worker(self, number, message):
        self.do(number, rack.from_worker(self.model, self.racks[number], message, 0.0))

    def rack_from_root(self, number, reply, w):
        step = rack.from_root(self.model, self.racks[number], reply)
        if step.takes:
            self.copies["rack", number] = w
        self.do(number, step)

    def do(self, number, step):
        self.racks[number] = step.state
        for effect in step.effects:
            if isinstance(effect, rack.Forward):
                stamp = effect.message.stamp
                found = combined(effect.merge, lambda one: self.payloads[one.client, one.sequence])
                self.payloads[number, stamp.sequence, "rack"] = found
                self.up(number, effect.message)
            elif isinstance(effect, rack.Ask):
                self.up(number, effect.message)
            else:
                assert not isinstance(effect, Refuse | Drop)
                self.send("worker_from_rack", effect, self.copies.get(("rack", number)))

    def root_from_rack(self, message, payload):
        before = self.root
        self.root, effects = server.receive(self.model, self.root, message)
        if isinstance(message, Push) and before != self.root:
            self.at_root["pushes"] += 1
            self.payloads["root", message.stamp.client, message.stamp.sequence] = payload
        for effect in effects:
            if isinstance(effect, Apply):
                found = combined(
                    effect.merge, lambda one: self.payloads["root", one.client, one.sequence]
                )
                self.applied.append(effect.merge)
                self.w = self.w - effect.merge.rate * found
            else:
                self.send("rack_from_root", effect.client, effect, self.w)

    def worker_from_rack(self, reply, w):
        heard = client.hear(self.workers[reply.client], reply)
        self.workers[reply.client] = heard.state
        if heard.takes:
            self.copies[reply.client] = w
        if isinstance(reply, Acknowledge):
            key = (reply.client, reply.sequence)
            assert key in self.counted, "told of what is not applied at the root"

    @property
    def counted(self):
        """Pushes of workers that are in the root's parameters."""
        up = {(p.arrival.client, p.arrival.sequence) for m in self.applied for p in m.parts}
        rounds = {}
        for worker, state in self.workers.items():
            number = self.rack_of[worker]
            sent = [sequence for who, sequence in sorted(up) if who == number]
            pushes = sorted(key for key in self.payloads if key[0] == worker and len(key) == 2)
            rounds |= dict.fromkeys(pushes[: len(sent)], state.clock)
        return rounds

    def run(self):
        for _ in range(30_000):
            self.step()
            if all(one.clock == STEPS and not one.under_way for one in self.workers.values()):
                return self
        raise AssertionError("stuck")


def quadratic(w, worker, clock):
    """Integers where w holds integers."""
    return w - np.float64([worker + 1, 10 * clock])


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_in_rounds_the_sums_are_those_of_workers_that_push_themselves(seed):
    """Sums of integers over a power of two round nothing: the orders do not matter."""
    found = Hierarchy(BSP(), [(10, 11), (12, 13)], seed, quadratic, dict.fromkeys(range(14), 1.0))
    found.run()
    w = np.zeros(2)
    for clock in range(STEPS):
        w = w - sum(quadratic(w, worker, clock) for worker in range(10, 14)) / 4
    np.testing.assert_array_equal(found.w, w)
    assert found.at_root["pushes"] == 2 * STEPS


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_racks_of_unlike_sizes_and_tokens_have_the_mean_of_all(seed):
    racks, tokens = [(10, 11, 12), (13,)], {10: 3.0, 11: 1.0, 12: 4.0, 13: 2.0}
    found = Hierarchy(BSP(), racks, seed, quadratic, tokens).run()
    w = np.zeros(2)
    for clock in range(STEPS):
        grads = [quadratic(w, worker, clock) for worker in tokens]
        w = w - np.average(grads, axis=0, weights=[*tokens.values()])
    np.testing.assert_allclose(found.w, w, rtol=1e-12)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_racks_are_bounded_by_the_model_of_the_root(seed):
    model = SSP(bound=1)
    found = Hierarchy(
        model, [(10, 11), (12, 13), (14,)], seed, quadratic, dict.fromkeys(range(15), 1.0)
    )
    found.run()
    clocks = Counter()
    for merge in found.applied:
        (part,) = merge.parts
        assert part.arrival.clock == clocks[part.arrival.client]
        assert part.arrival.clock - min(clocks[number] for number in range(3)) <= 1
        clocks[part.arrival.client] += 1
    assert set(clocks.values()) == {STEPS}


def started():
    state = rack.begin_rack(7, 2)
    for worker in 0, 1:
        state = rack.join_rack(BSP(), state, worker).state
    return state


def test_a_rack_asks_once_and_answers_all():
    state, effects, _ = rack.from_worker(BSP(), started(), Pull(Stamp(0, 0, 0)), 0.0)
    assert effects == (rack.Ask(Pull(Stamp(0, 7, 0))),)
    state, effects, _ = rack.from_worker(BSP(), state, Pull(Stamp(0, 1, 0)), 0.0)
    assert effects == ()
    step = rack.from_root(BSP(), state, Answer(7, 0, clock=0, version=5, floor=0))
    assert step.takes
    assert step.effects == (Answer(0, 0, 0, 0, 0), Answer(1, 0, 0, 0, 0))


def test_a_rack_that_comes_later_is_where_the_servers_are():
    """It joins a run, or rounds went on without it: its workers compute no clock that is over."""
    state = rack.from_worker(BSP(), started(), Pull(Stamp(0, 0, 0)), 0.0).state
    step = rack.from_root(BSP(), state, Answer(7, 0, clock=5, version=5, floor=5))
    assert step.effects == (Answer(0, 0, 5, 5, 5),)
    state, effects, _ = rack.from_worker(BSP(), step.state, Pull(Stamp(0, 1, 0)), 0.0)
    assert effects == (Answer(1, 0, 5, 5, 5),)
    for worker in 0, 1:
        push = Push(Stamp(0, worker, 1), 5, 5)
        state, effects, _ = rack.from_worker(BSP(), state, push, 0.0)
    assert effects[0].message == Push(Stamp(0, 7, 1), 5, 5, tokens=2.0)


def test_a_rack_drops_a_push_for_a_round_that_is_over_here():
    """The worker computes the round for another server, which has not ended it."""
    state = rack.from_worker(BSP(), started(), Pull(Stamp(0, 0, 0)), 0.0).state
    state = rack.from_root(BSP(), state, Answer(7, 0, clock=5, version=5, floor=5)).state
    state, effects, _ = rack.from_worker(BSP(), state, Push(Stamp(0, 0, 1), 4, 5), 0.0)
    assert effects == (Drop(0, 1, "round 4 is over"), Acknowledge(0, 1, None))
    _, effects, _ = rack.from_worker(BSP(), state, Pull(Stamp(0, 0, 2)), 0.0)
    assert effects == (Answer(0, 2, 5, 5, 5),)


def test_a_push_that_cannot_be_written_is_sent_as_unusable():
    state = client.hear(client.pull(client.ClientState(7)).state, Answer(7, 0, 0, 0, 0)).state
    state, message = client.push(state)
    (again,) = client.retries(client.marked_unusable(state, message.stamp.sequence))
    assert again == Push(Stamp(0, 7, 1), 0, 0, usable=False)


def test_a_worker_that_has_read_nothing_is_refused():
    step = rack.from_worker(BSP(), started(), Push(Stamp(0, 0, 0), 0, 0), 0.0)
    assert step.state == started()
    assert "pull first" in step.effects[0].reason


def test_a_worker_that_leaves_holds_its_rack_up_no_more_and_a_drop_is_told():
    state = started()
    for worker in 0, 1:
        state = rack.from_worker(BSP(), state, Pull(Stamp(0, worker, 0)), 0.0).state
    state = rack.from_root(BSP(), state, Answer(7, 0, clock=0, version=0, floor=0)).state
    state = rack.from_worker(BSP(), state, Push(Stamp(0, 0, 1), 0, 0, tokens=3.0), 0.0).state
    step = rack.leave_rack(BSP(), state, 1)
    (forward,) = step.effects
    assert forward.message == Push(Stamp(0, 7, 1), 0, 0, tokens=3.0)
    told = rack.from_root(BSP(), step.state, Acknowledge(7, 1, None)).effects
    assert told == (Acknowledge(0, 1, None),)


def test_the_root_receives_by_the_racks_size_less():
    assert Direct().traffic(32, 1000) == PushTraffic(32_000, 0)
    assert Racks(size=8).traffic(32, 1000) == PushTraffic(4_000, 8_000)
    assert Racks(size=8).traffic(33, 1000).root == 5_000
    assert Direct().racks(range(3)) == ()


REFUSED = {
    "sums": (
        Elastic(),
        2,
        ("strategy", "aggregation", "type"),
        "but elastic needs the sum of all pushes",
    ),
    "one rack": (BSP(), 4, ("aggregation", "size"), "size 4 puts all 4 workers .* at most 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case):
    model, size, setting, message = REFUSED[case]
    racks = Cluster(workers=4, consistency=model, aggregation=Racks(size=size))
    with pytest.raises(ConfigError, match=message) as found:
        racks.check_cluster(learning_rate=0.1)
    assert found.value.setting == setting
    Cluster(workers=4, consistency=model).check_cluster(learning_rate=0.1)
    Cluster(workers=4, consistency=BSP(), aggregation=Racks(size=2)).check_cluster(
        learning_rate=0.1
    )


class Holder(BaseModel):
    aggregation: AggregationConfig


def test_a_config_chooses_by_type():
    def read(**values):
        return validate(Document({"aggregation": values}), Holder).aggregation

    assert read(type="direct") == Direct()
    assert read(type="racks", size=4) == Racks(size=4)
    with pytest.raises(ConfigError, match=r"aggregation\.size = 1"):
        read(type="racks", size=1)
