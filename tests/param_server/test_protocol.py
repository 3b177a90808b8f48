"""The laws of the consistency models, whatever the network does and whoever is slow."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from param_server_team import Chaos, Team, replayed

from jaxdist.param_server.consistency.arrival import SSP, AdaptiveSSP, Asynchronous
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.protocol import client as worker
from jaxdist.param_server.protocol import server
from jaxdist.param_server.protocol.inbox import WINDOW
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Apply,
    Drop,
    Publish,
    Pull,
    Push,
    Refuse,
    Stamp,
)
from jaxdist.param_server.protocol.server import RangeState

BAD = Chaos(loses=0.1, copies=0.2, reorders=True)
MODELS = {
    "bsp": BSP(),
    "bsp with backups": BSP(backups=1),
    "ssp 0": SSP(bound=0, reads="each_clock"),
    "ssp 2": SSP(bound=2, reads="each_clock"),
    "lazy 2": SSP(bound=2, reads="lazy"),
    "essp 2": SSP(bound=2, reads="eager"),
    "ahead 2": SSP(bound=2, reads="ahead"),
    "async": Asynchronous(),
    "async ahead": Asynchronous(reads="ahead"),
    "adaptive": AdaptiveSSP(least=1, most=3),
    "elastic": Elastic(),
    "elastic rounds": Elastic(order="rounds"),
    "decoupled": Decoupled(quorum=2, grace_seconds=30.0, at_least=1),
}
SEEDS = st.integers(0, 2**32)
SPEEDS = st.tuples(*[st.sampled_from([1, 3, 20])] * 3)


def quadratic(w, client, clock):
    """Of |w - c|^2 / 2, with a centre c of each worker and clock."""
    return w - np.random.default_rng([client, clock]).normal(size=np.shape(w))


def integers(w, client, clock):
    return np.float64(1 + 7 * client + 100 * clock)


def team(model, seed, *, chaos=BAD, speeds=None, gradient=quadratic, **more):
    more = {"start": np.ones(3), **more}
    return Team(model, 3, gradient, seed=seed, chaos=chaos, speeds=speeds, **more)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6)
@given(seed=SEEDS, speeds=SPEEDS)
def test_every_change_counts_exactly_once_in_its_clients_order(name, seed, speeds):
    found = team(MODELS[name], seed, speeds=speeds, gradient=integers, start=0.0, learning_rate=-1)
    found.run()
    order = [part.arrival for _, merge in found.applied for part in merge.parts]
    settled = [(one.client, one.sequence) for one in order]
    settled += [(client, sequence) for client, sequence, _ in found.dropped]
    assert Counter(settled) == Counter(found.payloads.keys())
    for client in range(3):
        own = [one.sequence for one in order if one.client == client]
        assert own == sorted(own)
    assert [version for version, _ in found.applied] == [*range(1, len(found.applied) + 1)]
    if name != "bsp with backups":
        assert not found.dropped
        assert Counter(one.client for one in order) == dict.fromkeys(range(3), 6)


@pytest.mark.parametrize("name", ["ssp 2", "ahead 2", "essp 2", "async", "adaptive", "elastic"])
@settings(max_examples=6)
@given(seed=SEEDS)
def test_sums_that_round_nothing_are_the_same_in_every_order(name, seed):
    model = MODELS[name]
    if name != "elastic":
        model = model.model_copy(update={"gradient_weight": "whole"})
    found = team(model, seed, gradient=integers, start=0.0, learning_rate=-1).run()
    assert found.w == sum(integers(0, client, clock) for client in range(3) for clock in range(6))


@settings(max_examples=15)
@given(seed=SEEDS, speeds=SPEEDS)
def test_bsp_is_synchronous_sgd_bit_for_bit(seed, speeds):
    w = np.ones(3)
    for clock in range(6):
        grads = [quadratic(w, client, clock) for client in range(3)]
        w = w + -0.1 * 1.0 * ((grads[0] + grads[1] + grads[2]) / 3)
    found = team(BSP(), seed, speeds=speeds).run()
    np.testing.assert_array_equal(found.w, w)


@pytest.mark.parametrize("name", ["bsp", "ssp 0", "lazy 2", "essp 2", "async"])
def test_one_worker_is_plain_sgd_bit_for_bit(name):
    w = np.ones(3)
    for clock in range(6):
        w = w - 0.1 * quadratic(w, 0, clock)
    found = Team(MODELS[name], 1, quadratic, chaos=BAD, start=np.ones(3))
    np.testing.assert_array_equal(found.run().w, w)


@settings(max_examples=12)
@given(seed=SEEDS, speeds=SPEEDS)
def test_updates_on_arrival_are_applied_one_by_one(seed, speeds):
    """A fold over the changes in the order of their arrival, each over the number of workers."""
    found = team(Asynchronous(), seed, speeds=speeds).run()
    w = np.ones(3)
    for version, merge in found.applied:
        (part,) = merge.parts
        assert part.staleness == version - 1 - part.arrival.version >= 0
        w = w + -0.1 * (1 / 3) * found.payloads[part.arrival.client, part.arrival.sequence]
    np.testing.assert_array_equal(found.w, w)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("bsp", 0),
        ("ssp 0", 0),
        ("ssp 2", 2),
        ("lazy 2", 2),
        ("essp 2", 2),
        ("ahead 2", 2),
        ("adaptive", 3),
        ("elastic rounds", 0),
    ],
)
@settings(max_examples=15)
@given(seed=SEEDS, speeds=SPEEDS)
@pytest.mark.every(3)
def test_no_read_is_staler_than_the_bound(name, bound, seed, speeds):
    """A copy holds all changes of clocks before clock - bound, of all workers."""
    found = team(MODELS[name], seed, speeds=speeds).run()
    included = [set()]
    for _, merge in found.applied:
        news = {(part.arrival.client, part.arrival.clock) for part in merge.parts}
        included.append(included[-1] | news)
    for _, clock, version, floor in found.reads:
        assert clock - floor <= bound
        owed = {(client, before) for client in range(3) for before in range(max(0, clock - bound))}
        assert owed <= included[version]


def test_the_bound_is_reached_and_no_more():
    """With a worker that is ever so slow, the others are as far ahead as they may be."""
    for name in "ssp 2", "lazy 2", "essp 2", "ahead 2", "adaptive":
        bound = 3 if name == "adaptive" else 2
        leads = [
            clock - floor
            for seed in range(6)
            for _, clock, _, floor in team(MODELS[name], seed, speeds=(1, 40, 40)).run().reads
        ]
        assert max(leads) == bound, name


def test_without_a_bound_a_fast_worker_does_not_wait():
    found = team(Asynchronous(), 0, chaos=Chaos(), speeds=(1, 400, 400)).run()
    assert max(clock - floor for _, clock, _, floor in found.reads) == 5


def test_all_but_reads_ahead_ask_once_before_each_computation():
    """Lazy reads are those of each clock: after its own change a worker's copy is never enough."""

    def found(reads):
        model = SSP(bound=4, reads=reads)
        run = team(model, 0, chaos=Chaos(), steps=20).run()
        asked = {thing.stamp for kind, thing, _ in run.log if kind == "message"}
        return run.reads, len(asked) - 60

    each, lazy, eager, ahead = map(found, ["each_clock", "lazy", "eager", "ahead"])
    assert lazy == each
    assert each[1] == 60 >= eager[1]
    assert ahead[0] != each[0]


def history(name, seed, tokens=lambda client, clock: 1.0):
    """A run in which workers come and go and the range moves, on a network that does its worst."""
    rng = random.Random(seed)
    speeds = tuple(rng.choice([1, 3, 20]) for _ in range(3))
    found = team(MODELS[name], seed, speeds=speeds, steps=5, tokens=tokens)
    for number in range(3, 3 + rng.randrange(3)):
        for _ in range(rng.randrange(100)):
            found.tick()
            found.deliver() if rng.random() < 0.7 else found.act(rng.choice([*found.clients]))
        if rng.random() < 0.7:
            found.leave(rng.choice([*found.clients]))
        if rng.random() < 0.9:
            found.join(number)
        if rng.random() < 0.3:
            found.move()
    return found.run()


def masked(client, clock):
    """Weights of pushes, a third of which have no tokens; in clock 2 none has."""
    return 0.0 if clock == 2 else float(random.Random(f"{client} {clock}").choice([0, 1, 4]))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5)
@given(seed=SEEDS, speeds=SPEEDS)
def test_pushes_without_tokens_add_nothing_and_the_clocks_advance(name, seed, speeds):
    """Their payloads hold NaN: what they say of the parameters is never used."""
    found = team(MODELS[name], seed, speeds=speeds, tokens=masked).run()
    counted = {
        (part.arrival.client, part.arrival.clock): part.arrival.tokens
        for _, merge in found.applied
        for part in merge.parts
    }
    assert all(tokens == masked(*key) > 0 for key, tokens in counted.items())
    if name != "bsp with backups":
        every = {(client, clock) for client in range(3) for clock in range(6)}
        assert counted.keys() == {key for key in every if masked(*key)}
        assert {reason for _, _, reason in found.dropped} == {"the push has no tokens"}
        assert found.state.clocks.clocks == dict.fromkeys(range(3), 6)
    assert np.isfinite(found.w).all()
    assert not found.refused
    twin = replayed(found)
    np.testing.assert_array_equal(twin.w, found.w)


@settings(max_examples=10)
@given(seed=SEEDS, speeds=SPEEDS)
def test_a_round_is_the_mean_over_all_tokens_and_one_of_none_takes_no_step(seed, speeds):
    w, steps = np.ones(3), 0
    for clock in range(6):
        weights = [masked(client, clock) for client in range(3)]
        if any(weights):
            grads = [quadratic(w, client, clock) for client in range(3)]
            w = w - 0.1 * np.average(grads, axis=0, weights=weights)
            steps += 1
    found = team(BSP(), seed, speeds=speeds, tokens=masked).run()
    np.testing.assert_allclose(found.w, w, rtol=1e-12)
    assert [version for version, _ in found.applied] == [*range(1, 7)]
    assert sum(bool(merge.parts) for _, merge in found.applied) == steps < 6


BOUNDS = {"bsp": 0, "ssp 0": 0, "elastic rounds": 0, "adaptive": 3}
BOUNDS |= {"ssp 2": 2, "lazy 2": 2, "essp 2": 2, "ahead 2": 2}


def check_history(name, seed, **more):
    """Once each, in order, none of a living worker lost; no floor falls; the bound holds; the log
    replays to the same bits."""
    found = history(name, seed, **more)
    assert not any("tokens" in reason or "client's next" in reason for reason in found.refused)
    order = [part.arrival for _, merge in found.applied for part in merge.parts]
    settled = [(one.client, one.sequence) for one in order]
    settled += [(client, sequence) for client, sequence, _ in found.dropped]
    assert len(settled) == len(set(settled))
    assert {key for key in found.payloads if key[0] in found.clients} <= set(settled)
    for client in {one.client for one in order}:
        own = [one.sequence for one in order if one.client == client]
        assert own == sorted(own)
    assert found.floors == sorted(found.floors)
    if name in BOUNDS:
        assert all(clock - floor <= BOUNDS[name] for _, clock, _, floor in found.reads)
    twin = replayed(found)
    np.testing.assert_array_equal(twin.w, found.w)
    assert (twin.state, twin.applied) == (found.state, found.applied)


@pytest.mark.parametrize("name", MODELS)
def test_workers_come_and_go_and_the_range_moves(name):
    for seed in range(4):
        check_history(name, seed, **{"tokens": masked} if seed % 2 else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ten_thousand_histories(name):
    for seed in range(10_000 // len(MODELS) + 1):
        check_history(name, seed, **{"tokens": masked} if seed % 2 else {})


def test_a_worker_that_leaves_holds_nobody_up():
    model, state = BSP(), RangeState(Clocks(2))
    for client in 0, 1:
        state = server.join(model, state, client).state
        state = server.receive(model, state, Pull(Stamp(0, client, 0))).state
    state, effects = server.receive(model, state, Push(Stamp(0, 0, 1), 0, 0))
    assert effects == ()
    state, effects = server.receive(model, state, Pull(Stamp(0, 0, 2)))
    assert (effects, state.late) == ((), (1,))
    state, effects = server.leave(model, state, 1)
    assert [type(one) for one in effects] == [Apply, Acknowledge, Answer]
    assert effects[-1] == Answer(0, 2, clock=1, version=1, floor=1)


@pytest.mark.parametrize("model", [BSP(), Elastic(order="rounds")])
def test_what_the_dead_have_sent_stands_for_no_member(model):
    """Client 1 pushes and dies, client 2 comes: the round has the dead one's change, and waits."""
    state = joined(model)
    state = server.receive(model, state, Push(Stamp(0, 1, 0), 0, 0)).state
    state = server.leave(model, state, 1).state
    state = server.join(model, state, 2).state
    state, effects = server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0))
    assert (effects, state.late) == ((), (2,))
    state, effects = server.receive(model, state, Push(Stamp(0, 2, 0), 0, 0))
    assert [part.arrival.client for part in effects[0].merge.parts] == [0, 1, 2]


def joined(model, workers=2):
    state = RangeState(Clocks(workers))
    for client in range(workers):
        state = server.join(model, state, client).state
    return state


def test_backups_are_not_waited_for_and_come_too_late():
    model = BSP(backups=1)
    state = joined(model, 3)
    for client in range(3):
        state = server.receive(model, state, Pull(Stamp(0, client, 0))).state
    state, effects = server.receive(model, state, Push(Stamp(0, 2, 1), 0, 0))
    assert effects == ()
    state, effects = server.receive(model, state, Push(Stamp(0, 1, 1), 0, 0))
    assert [part.arrival.client for part in effects[0].merge.parts] == [1, 2]
    assert effects[0].merge.total == 2
    state, effects = server.receive(model, state, Push(Stamp(0, 0, 1), 0, 0))
    assert effects == (Drop(0, 1, "round 0 is over"), Acknowledge(0, 1, None))
    state, effects = server.receive(model, state, Pull(Stamp(0, 0, 2)))
    assert effects == (Answer(0, 2, clock=1, version=1, floor=1),)


def test_a_late_worker_goes_on_with_the_open_round():
    model = BSP(backups=1)
    state = joined(model, 2)
    state = server.receive(model, state, Pull(Stamp(0, 1, 0))).state
    for round in range(3):
        messages = Pull(Stamp(0, 0, 2 * round)), Push(Stamp(0, 0, 2 * round + 1), round, round)
        for message in messages:
            state = server.receive(model, state, message).state
    state, _ = server.receive(model, state, Push(Stamp(0, 1, 1), 0, 0))
    state, effects = server.receive(model, state, Pull(Stamp(0, 1, 2)))
    assert effects == (Answer(1, 2, clock=3, version=3, floor=3),)
    state, effects = server.receive(model, state, Push(Stamp(0, 1, 3), 3, 3))
    assert effects[0] == Apply(effects[0].merge, 4)


def test_a_retry_gets_the_stored_answer():
    model = Asynchronous()
    state = joined(model)
    push = Push(Stamp(0, 0, 0), 0, 0)
    first = server.receive(model, state, push)
    assert first.effects[1] == Acknowledge(0, 0, 1)
    state = server.receive(model, first.state, Push(Stamp(0, 1, 0), 0, 0)).state
    again = server.receive(model, state, push)
    assert again == (state, (Acknowledge(0, 0, 1),))


def test_a_retried_pull_is_answered_with_what_may_be_read_now():
    """Read ahead: the answer is lost, and the client has pushed in the meantime."""
    model = SSP(bound=0, reads="ahead")
    state = joined(model)
    pull, push = Pull(Stamp(0, 0, 0)), Push(Stamp(0, 0, 1), 0, 0)
    state, effects = server.receive(model, state, pull)
    assert effects == (Answer(0, 0, clock=0, version=0, floor=0),)
    state = server.receive(model, state, push).state
    state, effects = server.receive(model, state, pull)
    assert (effects, state.reads) == ((), (pull.stamp,))
    assert server.receive(model, state, pull) == (state, ())
    state, effects = server.receive(model, state, Push(Stamp(0, 1, 0), 0, 0))
    assert effects[-1] == Answer(0, 0, clock=1, version=2, floor=1)


def test_a_retry_of_a_held_change_is_not_held_twice():
    model = BSP()
    state = joined(model)
    state = server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0)).state
    assert server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0)) == (state, ())


def test_outcomes_are_kept_for_a_window_and_no_longer():
    model = Asynchronous()
    state = joined(model)
    for clock in range(3 * WINDOW):
        state = server.receive(model, state, Push(Stamp(0, 0, clock), clock, clock)).state
    assert len(state.inboxes[0].outcomes) == WINDOW
    assert server.receive(model, state, Push(Stamp(0, 0, 5), 5, 5)) == (state, ())


def test_a_change_with_a_nan_is_not_applied_and_holds_nobody_up():
    for model in Asynchronous(), BSP(), Elastic(order="rounds"):
        state = joined(model)
        bad = server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0, usable=False))
        good = server.receive(model, bad.state, Push(Stamp(0, 1, 0), 0, 0))
        effects = (*bad.effects, *good.effects)
        (apply,) = (one for one in effects if isinstance(one, Apply))
        assert [part.arrival.client for part in apply.merge.parts] == [1]
        drops = [one for one in effects if isinstance(one, Drop)]
        assert drops == [Drop(0, 0, "the push contains a NaN or an infinity")]
        assert good.state.clocks.clocks == {0: 1, 1: 1}


def test_a_round_of_nothing_usable_moves_the_version_alone():
    model = BSP()
    state = joined(model, 1)
    state, effects = server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0, usable=False))
    assert effects[0].merge.parts == ()
    assert effects[1:] == (
        Drop(0, 0, "the push contains a NaN or an infinity"),
        Acknowledge(0, 0, None),
    )
    assert state.clocks.version == 1


def test_eager_versions_go_to_all_when_the_slowest_moves():
    model = SSP(bound=2, reads="eager")
    state = joined(model)
    state, effects = server.receive(model, state, Push(Stamp(0, 0, 0), 0, 0))
    assert not [one for one in effects if isinstance(one, Publish)]
    state, effects = server.receive(model, state, Push(Stamp(0, 1, 0), 0, 0))
    assert effects[-2:] == (Publish(0, 2, 1), Publish(1, 2, 1))


def test_a_client_does_not_compute_before_it_knows_its_clock():
    """Of a publication, which may overtake the answer to a new member's first pull, it does not."""
    model = SSP(bound=1, reads="ahead")
    state = worker.hear(worker.pull(worker.ClientState(3)).state, Publish(3, 6, 2)).state
    assert not worker.ready(model, state)
    state = worker.hear(state, Answer(3, 0, clock=2, version=6, floor=2)).state
    assert worker.ready(model, state)
    assert state.clock == 2


def test_a_client_keeps_the_newest_copy_and_hears_an_answer_once():
    """A published version overtakes the answer to a pull; the answer comes twice."""
    state, message = worker.pull(worker.ClientState(4))
    state, takes, *_ = worker.hear(state, Publish(4, version=7, floor=2))
    assert takes
    assert not worker.ready(SSP(), state)
    answer = Answer(4, message.stamp.sequence, clock=0, version=5, floor=1)
    heard = worker.hear(state, answer)
    assert not heard.takes
    assert (heard.state.version, heard.state.floor, heard.state.admitted) == (7, 2, 0)
    assert worker.ready(SSP(), heard.state)
    assert worker.hear(heard.state, replace(answer, version=9)) == worker.Heard(heard.state)


def test_a_client_sends_again_in_the_new_epoch_what_is_under_way():
    model, range_state = SSP(), joined(SSP())
    state, first = worker.pull(worker.ClientState(0))
    range_state = server.range_in_epoch(range_state, 1)
    _, (refusal,) = server.receive(model, range_state, first)
    heard = worker.hear(state, refusal)
    assert (
        heard.refused
        == "epoch 0 differs from the epoch 1 of the range: request the current placement"
    )
    state = worker.client_in_epoch(heard.state, refusal.epoch)
    (again,) = worker.retries(state)
    assert again == Pull(Stamp(1, 0, 0))
    range_state, effects = server.receive(model, range_state, again)
    assert effects == (Answer(0, 0, 0, 0, 0),)


def test_a_client_has_a_window_of_messages():
    state = worker.hear(worker.pull(worker.ClientState(0)).state, Answer(0, 0, 0, 0, 0)).state
    for _ in range(WINDOW):
        assert state.room
        state, message = worker.push(state)
    assert not state.room
    settled = worker.hear(state, Acknowledge(0, 1, 1))
    assert (settled.settled, settled.state.room) == (1, True)
    assert message.stamp.sequence == WINDOW


REFUSED = {
    "an older epoch": (Pull(Stamp(2, 0, 0)), r"epoch 2 differs from the epoch 3"),
    "a newer epoch": (Pull(Stamp(4, 0, 0)), r"epoch 4 differs from the epoch 3"),
    "a stranger": (Pull(Stamp(3, 9, 0)), r"client 9 is not a member: join first"),
    "far ahead": (Pull(Stamp(3, 0, WINDOW)), r"message 64 is not within 64 of the next message, 0"),
    "negative": (Pull(Stamp(3, 0, -1)), r"message -1 is not within"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_messages_change_nothing(case):
    message, reason = REFUSED[case]
    model, state = SSP(), RangeState(Clocks(2), 3)
    for client in 0, 1:
        state = server.join(model, state, client).state
    after, (refusal,) = server.receive(model, state, message)
    assert after == state
    assert isinstance(refusal, Refuse)
    assert refusal.reason.startswith(reason.replace("\\", ""))
    assert refusal.epoch == 3


IMPOSSIBLE = {
    "a version to come": (Push(Stamp(0, 0, 0), 0, 1), "version 1 does not exist yet"),
    "a clock of the past": (
        Push(Stamp(0, 0, 0), -1, 0),
        "clock -1 is not the client's next clock, 0",
    ),
    "a clock to come": (Push(Stamp(0, 0, 0), 1, 0), "clock 1 is not the client's next clock, 0"),
    "less than no tokens": (Push(Stamp(0, 0, 0), 0, 0, tokens=-1.0), "-1.0 tokens"),
    "no number of tokens": (Push(Stamp(0, 0, 0), 0, 0, tokens=float("nan")), "nan tokens"),
    "tokens without end": (Push(Stamp(0, 0, 0), 0, 0, tokens=float("inf")), "inf tokens"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_no_worker_sends_is_dropped_and_its_client_is_told_why(case):
    """The clock stays, so that a client that went on would ask for parameters for ever."""
    message, reason = IMPOSSIBLE[case]
    model = BSP()
    state = joined(model)
    after, effects = server.receive(model, state, message)
    assert effects[0].reason.startswith(reason)
    assert effects[1:] == (Refuse(0, 0, effects[0].reason, 0),)
    assert after.clocks == state.clocks
    assert server.receive(model, after, message) == (after, effects[1:]), "and so is a retry"


@pytest.mark.parametrize("model", [BSP(), SSP(bound=1), AdaptiveSSP(least=0, most=1), Decoupled()])
def test_a_client_that_does_not_wait_is_kept_within_the_bound(model):
    """It pushes without having read: the server does not believe it."""
    state, applied = joined(model), 0
    for clock in range(6):
        state, effects = server.receive(model, state, Push(Stamp(0, 0, clock), clock, 0))
        applied += sum(isinstance(one, Apply) for one in effects)
        dropped = [one for one in effects if isinstance(one, Drop)]
        if dropped:
            break
    lead = {"bsp": 1, "ssp": 2, "adaptive": 2, "decoupled": 1}[model.type]
    assert clock == lead
    assert state.clocks.clocks[0] - state.clocks.floor == lead


def test_a_number_that_was_used_is_refused():
    model = SSP()
    state = joined(model)
    gone = server.leave(model, state, 1).state
    for before in state, gone:
        after, (refusal,) = server.join(model, before, 1)
        assert after == before
        assert "use a number that was never used" in refusal.reason
    assert server.leave(model, gone, 1) == (gone, ())
