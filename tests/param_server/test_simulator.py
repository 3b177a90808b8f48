"""A simulated parameter server on quadratics: exact where the mathematics is."""

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxdist.errors import ConfigError
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import (
    SSP,
    AdaptiveSSP,
    Asynchronous,
    DelayCompensation,
)
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.central import Central
from jaxdist.param_server.scenario import (
    Crash,
    NetworkConfig,
    Pause,
    SimulationConfig,
    Straggler,
    shares_by_speed,
)
from jaxdist.param_server.training.worker import Worker
from jaxdist.simulation.engine.network import (
    HEADER_BYTES,
    WINDOW_BYTES,
    EventQueue,
    Network,
)
from jaxdist.simulation.engine.problem import Computed, Sgd
from jaxdist.simulation.engine.run import Simulation, simulate_training
from jaxdist.simulation.engine.table import simulation_table

RATE = 0.1
INSTANT = NetworkConfig(bytes_per_second=1e300, server_bytes_per_second=1e300, latency_seconds=0.0)
BAD = NetworkConfig(
    latency_seconds=0.01, jitter_seconds=0.2, loss=0.1, copies=0.2, retry_seconds=0.3
)


class Quadratic:
    """|w - c|^2 / 2 with another c for each worker and step; the loss has c = 0."""

    start = {"w": np.ones((6, 2)), "b": np.float64(3.0)}  # noqa: RUF012

    def __init__(self, tokens=lambda worker: 1.0, noise=1.0):
        self.tokens, self.noise = tokens, noise

    def gradient(self, params, worker, step):
        rng = np.random.default_rng([worker, step])
        found = {
            name: array - self.noise * rng.normal(size=np.shape(array))
            for name, array in params.items()
        }
        return Computed(found, self.tokens(worker))

    def loss(self, params):
        return float(sum(np.square(array).sum() for array in params.values()) / 2)


def simulated(
    model,
    *,
    workers=3,
    steps=5,
    servers=1,
    problem=None,
    rule=None,
    measure_every=10,
    pooled=False,
    **script,
):
    cluster = Cluster(
        workers=workers,
        servers=servers,
        consistency=model,
        placement=Balanced(range_bytes=16) if servers > 1 else Central(),
        simulation=SimulationConfig(**script),
    )
    problem, rule = problem or Quadratic(), rule or Sgd(RATE)
    return simulate_training(
        cluster, problem, rule, clocks=steps, measure_every=measure_every, pooled=pooled
    )


def synchronous(workers, steps, problem=None):
    problem = problem or Quadratic()
    params = {name: np.asarray(array) for name, array in problem.start.items()}
    for step in range(steps):
        found = [problem.gradient(params, worker, step).gradient for worker in range(workers)]
        for name in params:
            total = found[0][name]
            for one in found[1:]:
                total = total + one[name]
            mean = total / workers if workers > 1 else total
            params[name] = params[name] - RATE * mean
    return params


def assert_same(found, expected):
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), servers=st.integers(1, 4), workers=st.integers(1, 4))
def test_bsp_is_synchronous_sgd_bit_for_bit(seed, servers, workers):
    """Whatever the network loses and the workers' speeds are, on any number of servers."""
    found = simulated(BSP(), workers=workers, servers=servers, seed=seed, link=BAD, noise=0.5)
    assert_same(found.params, synchronous(workers, 5))
    assert found.staleness == {0: 5 * workers * servers}


MODELS = {
    "bsp": BSP(),
    "backups": BSP(backups=1),
    "ssp": SSP(bound=2),
    "eager": SSP(bound=2, reads="eager"),
    "lazy": SSP(bound=1, reads="lazy"),
    "ahead": SSP(bound=3, reads="ahead"),
    "async": Asynchronous(staleness_power=1.0, delay_compensation=DelayCompensation(decay=0.9)),
    "adaptive": AdaptiveSSP(least=0, most=3),
    "elastic": Elastic(every=3),
    "elastic rounds": Elastic(every=2, order="rounds"),
    "decoupled": Decoupled(local_steps=3, quorum=2, grace_seconds=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_gives_one_run_and_the_next_another(name):
    """With stragglers, losses, copies, jitter and a worker that dies and comes back."""

    def run(seed):
        return simulated(
            MODELS[name],
            servers=2,
            seed=seed,
            link=BAD,
            noise=0.3,
            steps=8,
            stragglers=(Straggler(worker=1, factor=4.0),),
            crashes=(Crash(worker=2, at_seconds=0.45, back_seconds=1.5),),
        )

    first, again, other = run(0), run(0), run(1)
    assert_same(again.params, first.params)
    assert again.as_json() == first.as_json() != other.as_json()
    assert first.work[2].crashes == 1
    assert first.lost > 0
    json.dumps(first.as_json(), allow_nan=False)
    assert first.curve[-1].loss < 0.9 * first.curve[0].loss


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    bound=st.integers(0, 4),
    slow=st.sampled_from([1.0, 3.0, 20.0]),
    reads=st.sampled_from(["eager", "lazy", "each_clock", "ahead"]),
    adaptive=st.booleans(),
)
def test_no_read_is_older_than_the_bound(seed, bound, slow, reads, adaptive):
    model = AdaptiveSSP(least=0, most=bound + 1) if adaptive else SSP(bound=bound, reads=reads)
    found = simulated(
        model,
        seed=seed,
        servers=2,
        link=BAD,
        noise=0.5,
        stragglers=(Straggler(worker=0, factor=slow),),
        crashes=(Crash(worker=1, at_seconds=0.3, back_seconds=0.9),),
    )
    assert found.reads >= 2 * 3 * 5
    assert found.largest_lead <= bound + adaptive


def test_a_slow_worker_lets_others_run_to_the_bound_and_no_further():
    slow = (Straggler(worker=0, factor=100.0),)
    leads = [simulated(SSP(bound=k), stragglers=slow).largest_lead for k in range(4)]
    assert leads == [0, 1, 2, 3]
    assert simulated(Asynchronous(), stragglers=slow).largest_lead == 4


def test_servers_receive_what_workers_push_and_no_more():
    """N S / shards each, and the headers of a pull and a push."""
    size = 8 * 13
    for servers in 1, 2:
        found = simulated(BSP(), servers=servers, workers=4, steps=5, link=INSTANT)
        messages = 2 * 4 * 5 * HEADER_BYTES
        assert sum(found.received_bytes) == 4 * 5 * size + servers * messages
        assert max(found.received_bytes) <= 4 * 5 * (size / servers + 8) + messages
        assert sum(found.sent_bytes) == 4 * 5 * size + servers * messages


def test_a_servers_card_bounds_a_round_and_two_servers_halve_it():
    """A round sends N S out, to all at a time, and then N S in: 2 N S."""
    card = 1e4
    link = NetworkConfig(
        bytes_per_second=1e9, server_bytes_per_second=card, latency_seconds=0.0, unevenness=0.0
    )
    problem = Quadratic()
    problem.start = {"w": np.ones((200, 5)), "b": np.float64(0.0)}
    times = []
    for servers in 1, 2:
        found = simulated(
            BSP(),
            workers=4,
            steps=5,
            servers=servers,
            link=link,
            step_seconds=1e-9,
            problem=problem,
        )
        least = 5 * (4 + 4) * (8 * 1001 / servers) / card
        assert least < found.seconds < 1.1 * least
        times.append(found.seconds)
    assert times[0] / times[1] == pytest.approx(2, rel=0.02)


def test_rounds_take_the_slowest_workers_time_and_asynchrony_does_not():
    slow = {"stragglers": (Straggler(worker=0, factor=4.0),), "link": INSTANT, "step_seconds": 1.0}
    bsp, free = (simulated(model, **slow) for model in (BSP(), Asynchronous()))
    assert bsp.seconds == pytest.approx(5 * 4)
    # Three seconds in each round but the last, after which nothing is left to do.
    assert [one.idle_seconds for one in bsp.work] == pytest.approx([0, 12, 12], abs=1e-9)
    assert [one.idle_seconds for one in free.work] == pytest.approx([0, 0, 0], abs=1e-9)
    assert [one.busy_seconds for one in free.work] == pytest.approx([20, 5, 5])
    assert bsp.work[1].idle_share == pytest.approx(12 / 17)


@pytest.mark.parametrize("model", [SSP(bound=1), Asynchronous(), Elastic(every=2)])
def test_from_a_pool_fast_workers_take_more(model):
    """Together as many as else; a fast one takes no more than its bound allows."""
    slow = {"stragglers": (Straggler(worker=0, factor=3.0),), "link": INSTANT, "step_seconds": 1.0}
    found = simulated(model, steps=8, pooled=True, **slow)
    pushes = [one.gradients for one in found.work]
    each = model.every if isinstance(model, Elastic) else 1
    assert sum(pushes) == 3 * 8 * each
    lead = max(pushes) - min(pushes)
    assert lead <= 2 if isinstance(model, SSP) else lead >= 4 * each
    assert sum(found.staleness.values()) == 24


def test_what_a_dead_worker_had_begun_goes_back_to_the_pool():
    script = {"link": INSTANT, "step_seconds": 1.0, "detect_seconds": 0.5}
    dies = (Crash(worker=0, at_seconds=1.5),)
    found = simulated(Asynchronous(), steps=8, pooled=True, crashes=dies, **script)
    assert [one.gradients for one in found.work] in ([1, 12, 11], [1, 11, 12])


def test_a_backup_worker_is_not_waited_for():
    slow = (Straggler(worker=2, factor=50.0),)
    script = {"stragglers": slow, "link": INSTANT, "step_seconds": 1.0}
    found = simulated(BSP(backups=1), **script)
    assert found.staleness == {0: 5 * 2}
    assert found.dropped == {"round 0 is over": 1}
    assert simulated(BSP(), **script).seconds == pytest.approx(250)
    assert found.curve[-2].seconds == pytest.approx(5) or found.curve[-1].updates == 5


def test_a_worker_that_dies_is_waited_for_until_it_is_found_out():
    script = {"link": INSTANT, "step_seconds": 1.0, "detect_seconds": 3.0}
    found = simulated(BSP(), crashes=(Crash(worker=0, at_seconds=1.5),), **script)
    # A step of a second, half of the second step, three seconds until it is found out, three steps.
    assert found.seconds == pytest.approx(1.5 + 3 + 3)
    assert found.staleness == {0: 3 + 4 * 2}
    assert (found.work[0].gradients, found.work[0].crashes) == (1, 1)


def test_a_server_that_pauses_is_waited_for_and_forgets_nothing():
    """Of two servers one stops within the second round: the round ends when it is back."""
    script = {"servers": 2, "step_seconds": 1.0, "link": INSTANT}
    stops = (Pause(server=1, at_seconds=1.5, back_seconds=4.0),)
    plain, paused = simulated(BSP(), **script), simulated(BSP(), pauses=stops, **script)
    assert_same(paused.params, plain.params)
    # Pushed at 2 s, and again every 0.2 s: taken at 4 s, and then three rounds more.
    assert paused.seconds == pytest.approx(4 + 3)
    assert plain.seconds == pytest.approx(5)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), length=st.sampled_from([0.3, 2.0]))
def test_pauses_change_no_bit_of_a_round(seed, length):
    stops = tuple(
        Pause(server=server, at_seconds=at, back_seconds=at + length)
        for server, at in ((0, 0.2), (1, 0.4), (0, 0.5))
    )
    found = simulated(BSP(), servers=2, seed=seed, link=BAD, noise=0.5, pauses=stops)
    assert_same(found.params, synchronous(3, 5))
    model = Decoupled(local_steps=2, quorum=2, grace_seconds=0.5)
    ended = simulated(model, servers=2, seed=seed, link=BAD, pauses=stops)
    assert sum(ended.staleness.values()) == 2 * 3 * 5


def test_elastic_averaging_in_rounds_is_the_papers_recursion():
    """x_i <- x_i - eta g_i(x_i) - alpha (x_i - c) at each exchange, plain steps between them."""
    problem, every, workers, alpha = Quadratic(), 3, 2, 0.2
    model = Elastic(every=every, alpha=alpha, order="rounds")
    found = simulated(model, workers=workers, steps=4, problem=problem, link=INSTANT)
    centre = {name: np.asarray(array) for name, array in problem.start.items()}
    x = [dict(centre) for _ in range(workers)]
    for clock in range(4):
        pulls = [{n: (own[n] - centre[n]) * alpha for n in own} for own in x]
        for worker in range(workers):
            for step in range(every):
                g = problem.gradient(x[worker], worker, clock * every + step).gradient
                for n in centre:
                    moved = x[worker][n] - RATE * g[n]
                    x[worker] = {**x[worker], n: moved - pulls[worker][n] if step == 0 else moved}
        centre = {n: centre[n] + (pulls[0][n] + pulls[1][n]) for n in centre}
    assert_same(found.params, centre)


def test_local_updates_of_one_step_without_momentum_are_synchronous_sgd():
    model = Decoupled(local_steps=1, learning_rate=1.0, momentum=0.0, nesterov=False)
    found = simulated(model, link=INSTANT)
    for name, array in synchronous(3, 5).items():
        np.testing.assert_allclose(found.params[name], array, rtol=1e-12, atol=1e-12)


def test_local_updates_send_less():
    few, many = (simulated(Decoupled(local_steps=n), steps=4) for n in (10, 1))
    assert few.received_bytes == many.received_bytes
    assert few.work[0].gradients == 10 * many.work[0].gradients == 40


def test_reads_ahead_hide_the_link():
    """A step takes as long as the link's way there and back: it hides, but for the first time."""
    link = NetworkConfig(bytes_per_second=1e300, server_bytes_per_second=1e300, latency_seconds=0.5)

    def run(reads):
        return simulated(Asynchronous(reads=reads), link=link, step_seconds=1.0, steps=6)

    waits, ahead = run("each_clock"), run("ahead")
    assert [one.idle_seconds for one in waits.work] == pytest.approx([6.0] * 3)
    assert [one.idle_seconds for one in ahead.work] == pytest.approx([1.0] * 3)
    assert ahead.mean_staleness > waits.mean_staleness


def test_a_value_bound_holds_workers_back():
    """A slow link, and copies that may be old: without the bound several changes are under way."""

    def run(bound):
        model = Asynchronous(reads="ahead", value_bound=bound)
        link = NetworkConfig(latency_seconds=5.0)
        return simulated(model, link=link, steps=8, workers=2, step_seconds=1.0)

    free, held, one = run(1e9), run(0.5), run(1e-9)
    assert one.seconds > held.seconds > free.seconds
    # Above the bound by a change of each worker at most, which is all there is under a tiny one.
    assert held.largest_value <= 0.5 + one.largest_value < free.largest_value


BY_ORDER = [(np.nan, 0.1), (0.1, np.nan)]


@pytest.mark.parametrize("values", BY_ORDER)
def test_a_value_bound_sees_a_nan_of_any_range_and_of_any_server(values, monkeypatch):
    model = Asynchronous(reads="ahead", value_bound=1e9)
    cluster = Cluster(workers=2, servers=2, consistency=model, placement=Balanced(range_bytes=16))
    run = Simulation(cluster, Quadratic(), Sgd(RATE), (1.0, 1.0), 5, 10, None, frozenset())
    assert np.isnan(run.values.of(np.array(values)))
    worker = run.workers[0]
    assert not worker._held_back()
    monkeypatch.setattr(worker, "under_way", lambda server: np.array([values[server]]))
    assert worker._held_back()
    # A server drops what holds a NaN, so that the report has the largest of the other changes.
    run.values.look([np.array([0.1])])
    known = run.values.largest
    run.values.look([np.array(values)])
    assert run.values.largest == known > 0


@pytest.mark.parametrize("values", BY_ORDER)
def test_a_worker_under_a_value_bound_sees_a_nan_of_any_server(values):
    held = []

    class Connected:
        clock = 0

        def under_way(self, server):
            return [np.array([values[server], 0.2], np.float32)]

        def wait_until(self, condition, what):
            held.append(not condition())

    cluster = SimpleNamespace(workers=2)
    sharded = SimpleNamespace(cluster=cluster, layouts=[None] * 2, rate_of=lambda clock: RATE)
    ignored = None, None, 0, 1, None, None
    worker = Worker(cast(Any, Connected()), cast(Any, sharded), *cast(Any, ignored))
    worker._hold_back(Asynchronous(reads="ahead", value_bound=1e9))
    assert held == [True]


def test_a_time_limit_ends_a_run():
    found = simulated(Asynchronous(), seconds=0.25, step_seconds=0.1, link=INSTANT)
    assert found.seconds <= 0.25
    assert [one.gradients for one in found.work] == [2, 2, 2]


def test_a_report_says_when_a_loss_was_reached_and_what_was_stale():
    found = simulated(Asynchronous(), steps=20, problem=Quadratic(noise=0.0), measure_every=1)
    first, last = found.curve[0], found.curve[-1]
    assert first.seconds == 0 < last.seconds
    assert found.seconds_to(first.loss) == 0
    assert found.seconds_to(last.loss) == last.seconds
    assert found.seconds_to(-1.0) is None
    assert sum(found.staleness.values()) == 60
    assert found.mean_staleness == pytest.approx(2, abs=0.1)  # the other two workers
    text = simulation_table(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "worker  gradients" in text
    assert "staleness in updates: mean 1.9" in text
    assert "60 reads checked: at most 1 clocks old; no bound" in text
    assert text.endswith(f"after 20 steps, {found.seconds:.5g} virtual seconds")


def test_tokens_weigh_unequal_shares_of_a_batch():
    """Shares by speed: all workers take about equal time, and a mean over examples is kept."""
    shares = shares_by_speed([1.0, 1.0, 2.0], 10)
    problem = Quadratic(tokens=lambda worker: float(shares[worker]))
    found = simulated(BSP(), problem=problem, steps=1)
    params = {name: np.asarray(array) for name, array in problem.start.items()}
    for name in params:
        grads = [problem.gradient(params, worker, 0).gradient[name] for worker in range(3)]
        mean = np.average(grads, axis=0, weights=shares)
        np.testing.assert_allclose(found.params[name], params[name] - RATE * mean, rtol=1e-12)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 4.0]), min_size=1, max_size=6), st.integers(6, 60))
def test_shares_by_speed_have_the_least_slowest_time(speeds, batch):
    """Moving an example from the slowest worker to any other makes that one as slow."""
    shares = shares_by_speed(speeds, batch)
    assert sum(shares) == batch
    assert min(shares) >= 1
    times = [share * speed for share, speed in zip(shares, speeds, strict=True)]
    slowest = max(times)
    at = times.index(slowest)
    if shares[at] > 1:
        assert all(
            time + speed >= slowest - 1e-9 for time, speed in zip(times, speeds, strict=True)
        )


def test_a_nan_is_dropped_and_the_run_goes_on():
    class Broken(Quadratic):
        def gradient(self, params, worker, step):
            found = super().gradient(params, worker, step)
            if (worker, step) != (1, 2):
                return found
            return found._replace(gradient={**found.gradient, "b": np.float64("nan")})

    for model in BSP(), SSP(), SSP(bound=0):
        found = simulated(model, problem=Broken())
        assert found.dropped == {"the push contains a NaN or an infinity": 1}
        assert np.isfinite(found.params["b"])
        assert sum(found.staleness.values()) == 14


REFUSED = {
    "speeds": ({"step_seconds": (0.1, 0.2)}, r"step_seconds has 2 times for 3 workers"),
    "straggler": ({"stragglers": (Straggler(worker=3, factor=2.0),)}, r"no worker 3: .* 0 to 2"),
    "pause": (
        {"pauses": (Pause(server=1, at_seconds=0, back_seconds=1),)},
        r"no server 1: servers are 0 to 0",
    ),
    "crash": ({"crashes": (Crash(worker=9, at_seconds=1.0),)}, r"crashes: there is no worker 9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_script_about_others_is_refused(case):
    script, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        simulated(BSP(), **script)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"2 examples leaves some of 3 workers without examples"):
        shares_by_speed([1, 1, 1], 2)
    with pytest.raises(ConfigError, match=r"backups 3 of 3 workers"):
        simulated(BSP(backups=3))
    with pytest.raises(ValidationError, match="less than 1"):
        NetworkConfig(loss=1.0)


def test_a_message_that_comes_later_has_the_less_of_a_card_the_more_was_sent():
    """Two that begin together end together; beside those nearly done a third begins slowly."""
    timeline, done = EventQueue(), {}
    link = NetworkConfig(server_bytes_per_second=1e5, latency_seconds=0.0, unevenness=0.0)
    network = Network(link, timeline, 0)

    def send(worker):
        arrived = lambda: done.setdefault(worker, timeline.now)  # noqa: E731
        network.send(("worker", worker), ("server", 0), 100_000 - HEADER_BYTES, arrived, assert_not)

    send(0), send(1)
    timeline.after(1.8, lambda: send(2))
    while timeline.step(10.0):
        pass
    share = WINDOW_BYTES / (WINDOW_BYTES + 2 * (WINDOW_BYTES + 90_000))
    assert done[0] == done[1] == pytest.approx(1.8 + 2 * 0.1 / (1 - share))
    assert done[2] == pytest.approx(3.0)


def assert_not():
    raise AssertionError("nothing is lost")
