"""Each consistency model beside its formula, and what its settings refuse."""

from dataclasses import replace

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.lars import LarsConfig
from jaxdist.param_server.consistency.arrays import (
    combined,
    delay_compensated,
    elastic_difference,
)
from jaxdist.param_server.consistency.arrival import (
    SSP,
    AdaptiveSSP,
    Asynchronous,
    DelayCompensation,
    extra_clocks,
)
from jaxdist.param_server.consistency.build import ConsistencyConfig
from jaxdist.param_server.consistency.contract import Arrival, Clocks, Merge, WeightedChange, decide
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic, alpha_limit
from jaxdist.param_server.consistency.notices import consistency_notices
from jaxdist.param_server.consistency.rounds import BSP, mean_of
from jaxdist.param_server.protocol import server
from jaxdist.param_server.protocol.messages import Apply, Push, Stamp
from jaxdist.param_server.protocol.server import RangeState


def members(count, **more):
    return Clocks(count, clocks=dict.fromkeys(range(count), 0), **more)


def arrived(clocks, *changes):
    for client, seconds, tokens in changes:
        clock = clocks.clocks[client]
        one = Arrival(client, clock, clock, clocks.version, tokens=tokens, seconds=seconds)
        clocks = clocks.arrived(one)
    return clocks


# Elastic averaging


def applied(model, state, pushes):
    """Effects of the pushes of (client, sequence, clock, version), and the state after them."""
    found = []
    for client, sequence, clock, version in pushes:
        message = Push(Stamp(0, client, sequence), clock, version)
        state, effects = server.receive(model, state, message)
        found += [effect for effect in effects if isinstance(effect, Apply)]
    return state, found


def started(model, workers):
    state = RangeState(Clocks(workers))
    for client in range(workers):
        state = server.join(model, state, client).state
    return state


def test_easgd_in_rounds_is_its_formula():
    """x_i <- x_i - eta g_i - alpha (x_i - c); c <- c + alpha sum_i (x_i - c), bit for bit."""
    model, workers, rate, alpha = Elastic(order="rounds", beta=0.9), 3, 0.3, 0.3
    assert model.rate_of(workers) == pytest.approx(alpha)
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(workers, 4)), rng.normal(size=(workers, 4))
    centre, ours, state = np.zeros(4), np.zeros(4), started(model, workers)
    for clock in range(8):
        moves = [elastic_difference(x[i], ours, alpha) for i in range(workers)]
        order = rng.permutation(workers)
        state, effects = applied(model, state, [(i, clock, clock, clock) for i in order])
        (effect,) = effects
        ours = ours + combined(effect.merge, lambda one, moves=moves: moves[one.client])
        pulls = [alpha * (x[i] - centre) for i in range(workers)]
        x = np.stack([x[i] - rate * (x[i] - target[i]) - pulls[i] for i in range(workers)])
        centre = centre + (pulls[0] + pulls[1] + pulls[2])
        np.testing.assert_array_equal(ours, centre)


def test_easgd_on_arrival_is_its_formula_and_loses_nothing():
    """c <- c + alpha (x_i - c) for each in turn; without gradients the sum of all stays."""
    model, workers = Elastic(alpha=0.25), 2
    x, centre, state = np.array([[3.0], [-1.0]]), np.zeros(1), started(model, workers)
    total = x.sum() + centre.sum()
    for turn in range(10):
        client = turn % workers
        move = elastic_difference(x[client], centre, 0.25)
        state, effects = applied(model, state, [(client, turn // 2, turn // 2, turn)])
        expected = 0.75 * centre + 0.25 * x[client]
        centre = centre + combined(effects[0].merge, lambda _, move=move: move)
        x[client] -= move
        np.testing.assert_array_equal(centre, expected)
        assert x.sum() + centre.sum() == pytest.approx(total, abs=1e-12)


def radius(matrix):
    return max(abs(np.linalg.eigvals(matrix)))


def in_rounds(rate, alpha, workers):
    """The map of all workers and the centre, on x^2 / 2."""
    full = np.eye(workers + 1) * (1 - rate - alpha)
    full[:-1, -1], full[-1, :-1], full[-1, -1] = alpha, alpha, 1 - workers * alpha
    return full


def in_turn(rate, alpha, workers, every=1):
    """The map after each worker has exchanged once, one after another."""
    full = np.eye(workers + 1)
    for worker in range(workers):
        one, rest = np.eye(workers + 1), (1 - rate) ** (every - 1)
        one[worker, worker], one[worker, -1] = rest * (1 - rate - alpha), rest * alpha
        one[-1, worker], one[-1, -1] = alpha, 1 - alpha
        full = one @ full
    return full


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("rate", [0.2, 1.0, 1.8])
def test_the_limit_of_alpha_is_where_the_map_stops_contracting(rate, workers):
    limit = alpha_limit(rate, workers)
    assert radius(in_rounds(rate, limit, workers)) == pytest.approx(1, abs=1e-9)
    assert radius(in_rounds(rate, 0.99 * limit, workers)) < 1
    assert radius(in_rounds(rate, 1.01 * limit, workers)) > 1
    alone = alpha_limit(rate, None)
    for every in (1, 2, 5):
        assert radius(in_turn(rate, 0.999 * alone, workers, every)) < 1
    if workers == 8:
        assert radius(in_turn(rate, 1.02 * alone, workers)) > 1


def test_an_unstable_elastic_config_is_refused_with_the_limit():
    Elastic().check(workers=8, learning_rate=0.1)
    with pytest.raises(
        ConfigError, match=r"alpha is 0.9, and with 1 work.*at most 0.6667"
    ) as found:
        Elastic().check(workers=1, learning_rate=1.0)
    assert found.value.setting == ("beta",)
    with pytest.raises(ConfigError, match=r"curvature 30 is 3, and at most 2 is stable"):
        Elastic(curvature=30.0).check(workers=8, learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"order rounds at most 0.2") as found:
        Elastic(alpha=0.3, order="rounds").check(workers=8, learning_rate=1.0)
    assert found.value.setting == ("alpha",)


# Corrections of staleness


def test_the_rate_falls_with_staleness_above_one():
    whole = Asynchronous(gradient_weight="whole", staleness_power=1.0)
    assert [whole.rate(s, 8) for s in (0, 1, 2, 10)] == [1, 1, 0.5, 0.1]
    share = Asynchronous(staleness_power=1.0)
    assert [share.rate(s, 4) for s in (0, 4, 8, 40)] == [0.25, 0.25, 0.125, 0.025]
    assert Asynchronous().rate(99, 4) == 0.25
    clocks = arrived(members(4, version=8), (0, 0.0, 1.0))
    clocks = replace(clocks, held=(replace(clocks.held[0], version=0),))
    (merge,) = decide(share, clocks).merges
    assert (merge.parts[0].staleness, merge.rate) == (8, 0.125)


def test_delay_compensation_is_its_formula():
    rng = np.random.default_rng(1)
    g, now, then = rng.normal(size=(3, 5))
    found, kept = delay_compensated(DelayCompensation(strength=0.5), g, now, then)
    np.testing.assert_allclose(found, g + 0.5 * g**2 * (now - then), rtol=1e-15)
    assert kept is None
    config, mean = DelayCompensation(strength=0.5, decay=0.9), np.zeros(5)
    for _ in range(3):
        expected = 0.9 * mean + 0.1 * g**2
        found, mean = delay_compensated(config, g, now, then, mean)
        np.testing.assert_allclose(mean, expected)
        strength = 0.5 / np.sqrt(expected + 1e-7)
        np.testing.assert_allclose(found, g + strength * g**2 * (now - then))


def test_delay_compensation_recovers_the_gradient_now_where_the_hessian_is_its_square():
    """Of -log(w) the Hessian is the gradient's square: what is left is of second order."""
    config = DelayCompensation(strength=1.0)
    stale, now = 2.0, 2.01
    found, _ = delay_compensated(config, np.float64(-1 / stale), np.float64(now), np.float64(stale))
    assert abs(found + 1 / now) < 2e-5 < abs(-1 / stale + 1 / now) / 100


def test_what_is_under_way_is_held_below_the_bound():
    model = Asynchronous(value_bound=0.8, reads="ahead")
    assert not model.holds_back(0.19, workers=4)
    assert model.holds_back(0.2, workers=4)
    assert model.holds_back(float("nan"), workers=4)
    assert not Asynchronous().holds_back(1e9, workers=4)


# Adaptive


@given(
    st.lists(st.integers(0, 60), min_size=4, max_size=4, unique=True).map(sorted), st.integers(0, 6)
)
def test_extra_clocks_leave_the_shortest_wait(times, most):
    """Beside a walk through the predicted pushes."""
    (a, c, b, d) = times
    pushed = {0: (float(a), float(b)), 1: (float(c), float(d))}

    def wait(clocks):
        done, push = b + clocks * (b - a), d + (d - c)
        while push < done:
            push += d - c
        return push - done

    found = extra_clocks(pushed, 0, 1, most)
    assert wait(found) == min(wait(clocks) for clocks in range(most + 1))
    assert all(wait(clocks) > wait(found) for clocks in range(found))


def test_without_two_pushes_nothing_is_predicted():
    assert extra_clocks({0: (1.0,), 1: (0.0, 9.0)}, 0, 1, 5) == 0
    assert extra_clocks({0: (1.0, 2.0)}, 0, 1, 5) == 0
    assert extra_clocks({0: (1.0, 2.0), 1: (3.0, 3.0)}, 0, 1, 5) == 0


def test_the_adaptive_bound_moves_with_the_straggler():
    """The reader is at clock 3, the slowest at 1; it goes on only where that shortens its wait."""
    model = AdaptiveSSP(least=1, most=4)

    def admitted(last, *, slowest=1):
        clocks = Clocks(
            2,
            clocks={0: 3, 1: slowest},
            floor=slowest,
            pushed={0: (9.0, 10.0), 1: (last - 5.0, last)},
        )
        return decide(model, clocks, [0]).admitted == (0,)

    assert admitted(last=10.0)  # whose next push is 5 seconds away
    assert not admitted(last=5.5)  # half a second
    assert admitted(last=5.5, slowest=2)  # within `least`


# Decoupled local updates


def test_a_quorum_is_merged_at_once_weighted_by_tokens():
    model = Decoupled(quorum=2)
    clocks = arrived(members(3), (2, 1.0, 300.0))
    assert decide(model, clocks, [2], now=1e9).merges == ()
    found = decide(model, arrived(clocks, (0, 5.0, 100.0)), [2], now=5.0)
    (merge,) = found.merges
    assert [(part.arrival.client, part.weight) for part in merge.parts] == [(0, 1 / 3), (2, 1)]
    changes = {0: np.array([4.0, 0.0]), 2: np.array([0.0, 4.0])}
    mean = combined(merge, lambda one: changes[one.client])
    np.testing.assert_allclose(mean, [1, 3])
    assert found.admitted == (2,)


def test_a_worker_waits_for_its_own_change_to_be_merged():
    model = Decoupled(quorum=2)
    assert decide(model, arrived(members(3), (2, 1.0, 1.0)), [0, 1, 2]).admitted == (0, 1)


def test_a_grace_window_closes_without_the_rest():
    model = Decoupled(grace_seconds=10.0, at_least=2)
    clocks = arrived(members(4), (0, 3.0, 1.0))
    assert decide(model, clocks, now=99.0).merges == ()
    clocks = arrived(clocks, (1, 5.0, 1.0))
    waiting = decide(model, clocks, now=12.9)
    assert (waiting.merges, model.wake(waiting.clocks)) == ((), 13.0)
    closed = decide(model, clocks, now=13.0)
    assert [part.arrival.client for part in closed.merges[0].parts] == [0, 1]
    assert model.wake(closed.clocks) is None


def test_a_quorum_of_the_dead_is_not_waited_for():
    model = Decoupled(quorum=3)
    clocks = arrived(members(3), (0, 0.0, 1.0), (1, 0.0, 1.0))
    assert decide(model, clocks).merges == ()
    assert len(decide(model, clocks.left(2)).merges) == 1


def test_a_change_that_is_too_old_is_dropped():
    model, old = Decoupled(oldest=2), Arrival(0, 0, 0, version=1)
    assert model.refusal(members(2, version=3), old) is None
    reason = model.refusal(members(2, version=4), old)
    assert reason == "the push is 3 merges old, but strategy.consistency.oldest is 2"


def test_with_rate_one_and_no_momentum_parameters_are_averaged():
    model = Decoupled(learning_rate=1.0, momentum=0.0, nesterov=False)
    start, ends = np.float32([1, 2]), {0: np.float32([3, 2]), 1: np.float32([1, 4])}
    clocks = arrived(members(2), (0, 0.0, 1.0), (1, 0.0, 1.0))
    (merge,) = decide(model, clocks).merges
    change = combined(merge, lambda one: ends[one.client] - start)
    outer = model.outer()
    updates, _ = outer.update(-change, outer.init(start), start)
    np.testing.assert_array_equal(optax.apply_updates(start, updates), [2, 3])


# Means


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.5, 1e4) | st.just(0.0), st.booleans()), min_size=1, max_size=6)
)
def test_a_mean_is_weighted_by_tokens_and_leaves_out_what_does_not_count(given):
    held = [Arrival(n, 0, 0, 0, tokens=t, usable=ok) for n, (t, ok) in enumerate(given)]
    merge = mean_of(held[::-1], version=0)
    usable = [one for one in held if one.usable and one.tokens]
    assert merge.without == tuple(one for one in held if one not in usable)
    assert [part.arrival for part in merge.parts] == usable
    if usable:
        found = combined(merge, lambda one: np.float64(one.client))
        weights = [one.tokens for one in usable]
        mean = np.average([one.client for one in usable], weights=weights)
        assert found == pytest.approx(mean, rel=1e-12, abs=1e-12)


def test_one_change_and_equal_weights_round_as_plain_sums_do():
    changes = np.random.default_rng(3).normal(size=(3, 100))
    held = [Arrival(n, 0, 0, 0, tokens=1000 / 3) for n in range(3)]
    one = combined(mean_of(held[:1], 0), lambda arrival: changes[arrival.client])
    np.testing.assert_array_equal(one, changes[0])
    three = combined(mean_of(held, 0), lambda arrival: changes[arrival.client])
    np.testing.assert_array_equal(three, (changes[0] + changes[1] + changes[2]) / 3)


def test_a_merge_weighs_and_divides():
    parts = tuple(
        WeightedChange(Arrival(n, 0, 0, 0), weight, 0) for n, weight in enumerate([2.0, 1.0])
    )
    assert combined(Merge(parts, total=4.0), lambda one: 1.0 + one.client) == 1.0


# Settings


def test_asynchrony_with_moments_is_warned_of_with_the_reason():
    sgd, adam = SgdConfig(type="sgd", learning_rate=0.1), AdamWConfig(type="adamw")
    (said,) = consistency_notices(SSP(), sgd, 8)
    assert "consistency type ssp with optim.momentum 0.9" in said
    assert "about 0.875 with 8 workers" in said
    assert "to 0.43 in a clock" in said
    (said,) = consistency_notices(Asynchronous(), adam, 4)
    assert "type async with optim.type adamw" in said
    assert "decay 4 times in a clock" in said
    assert consistency_notices(AdaptiveSSP(), LambConfig(type="lamb"), 4)
    assert consistency_notices(AdaptiveSSP(), LarsConfig(type="lars"), 4)


def test_reads_that_save_no_question_are_told_of():
    sgd = SgdConfig(type="sgd", momentum=0.0)
    (lazy,) = consistency_notices(SSP(reads="lazy"), sgd, 2)
    assert "type ssp: reads lazy acts like reads each_clock" in lazy
    assert "parameters. Use each_clock, or use ahead" in lazy
    (eager,) = consistency_notices(AdaptiveSSP(reads="eager"), sgd, 2)
    assert "type adaptive: reads eager acts" in eager
    assert "the copies that servers send in addition are not used. Use each_clock" in eager
    assert consistency_notices(SSP(reads="ahead"), sgd, 2) == ()


def test_nothing_is_said_where_nothing_is_stale():
    sgd = SgdConfig(type="sgd", momentum=0.0)
    adam = AdamWConfig(type="adamw")
    assert consistency_notices(SSP(), sgd, 8) == ()
    assert consistency_notices(SSP(), adam, 1) == ()
    assert consistency_notices(BSP(), adam, 8) == consistency_notices(Elastic(), adam, 8) == ()


REFUSED = {
    "all are backups": (
        BSP(backups=4),
        "backups",
        r"backups 4 of 4 workers: .* at most 3 workers can be",
    ),
    "a quorum of more": (
        Decoupled(quorum=5),
        "quorum",
        r"quorum 5 can never be reached by 4 workers",
    ),
    "a window for more": (
        Decoupled(at_least=5, grace_seconds=1.0),
        "at_least",
        r"at_least 5 can never be reached by 4 workers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_number_of_workers(case):
    model, setting, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as found:
        model.check(workers=4, learning_rate=0.1)
    assert found.value.setting == (setting,)
    for fine in BSP(backups=3), Decoupled(quorum=4), SSP(), Asynchronous(), AdaptiveSSP():
        fine.check(workers=4, learning_rate=0.1)


INVALID = {
    "adapts nothing": (lambda: AdaptiveSSP(least=3, most=3), "leave no range in which"),
    "value bound": (lambda: SSP(reads="each_clock", value_bound=1.0), "set reads: ahead"),
    "eager value bound": (lambda: AdaptiveSSP(reads="eager", value_bound=1.0), "with reads eager"),
    "alpha and beta": (lambda: Elastic(alpha=0.1, beta=0.9), "set only one of alpha"),
    "least without window": (lambda: Decoupled(at_least=2), "has no effect without grace_seconds"),
    "least above quorum": (
        lambda: Decoupled(at_least=3, quorum=2, grace_seconds=1.0),
        "at_least 3 exceeds quorum 2",
    ),
    "nesterov alone": (lambda: Decoupled(momentum=0.0), "nesterov has no effect without momentum"),
}


@pytest.mark.parametrize("case", INVALID)
def test_settings_that_contradict_each_other(case):
    make, message = INVALID[case]
    with pytest.raises(ValidationError, match=message):
        make()


class Holder(BaseModel):
    consistency: ConsistencyConfig


def read(**values):
    return validate(Document({"consistency": values}), Holder).consistency


def test_a_config_chooses_by_type():
    kinds = {"bsp": BSP, "ssp": SSP, "async": Asynchronous, "adaptive": AdaptiveSSP}
    kinds |= {"elastic": Elastic, "decoupled": Decoupled}
    assert {name: type(read(type=name)) for name in kinds} == kinds
    assert read(type="ssp", bound=4, delay_compensation={"decay": 0.95}).delay_compensation.decay


def test_a_config_names_the_value_that_cannot_be():
    with pytest.raises(ConfigError, match=r"consistency\.bound = -1"):
        read(type="ssp", bound=-1)
    with pytest.raises(ConfigError, match=r"consistency\.type = 'spp'.*did you mean 'ssp'"):
        read(type="spp")
