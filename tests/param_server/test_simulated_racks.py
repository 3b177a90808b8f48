"""Racks in a simulation: the same steps, and less into the servers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulator import BAD, INSTANT, RATE, Quadratic, assert_same, synchronous

from jaxdist.errors import ConfigError
from jaxdist.param_server.aggregation import Direct, Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import (
    SSP,
    AdaptiveSSP,
    Asynchronous,
    DelayCompensation,
)
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.scenario import Crash, SimulationConfig, Straggler
from jaxdist.simulation.engine.network import HEADER_BYTES
from jaxdist.simulation.engine.problem import Sgd
from jaxdist.simulation.engine.run import simulate_training


def simulated(
    model, *, size=2, workers=6, servers=2, steps=5, problem=None, pooled=False, **script
):
    cluster = Cluster(
        workers=workers,
        servers=servers,
        consistency=model,
        placement=Balanced(range_bytes=16),
        aggregation=Racks(size=size) if size else Direct(),
        simulation=SimulationConfig(**script),
    )
    problem = problem or Quadratic()
    return simulate_training(cluster, problem, Sgd(RATE), clocks=steps, pooled=pooled)


def two_level(size, workers, steps, tokens):
    """Rounds whose means are taken in racks first: in each, and of them, weighted by tokens."""
    problem = Quadratic(tokens=tokens)
    params = {name: np.asarray(array) for name, array in problem.start.items()}
    racks = Racks(size=size).racks(range(workers))

    def mean(arrays, weights):
        most = max(weights)
        total = sum(weight / most for weight in weights)
        found = None
        for array, weight in zip(arrays, weights, strict=True):
            scaled = array if weight == most else array * (weight / most)
            found = scaled if found is None else found + scaled
        return found / total if total != 1 else found

    for step in range(steps):
        found = [problem.gradient(params, worker, step).gradient for worker in range(workers)]
        for name in params:
            own = [[tokens(worker) for worker in rack] for rack in racks]
            means = [
                mean([found[worker][name] for worker in rack], weights)
                for rack, weights in zip(racks, own, strict=True)
            ]
            weights = [sum(weights) for weights in own]
            params[name] = params[name] - RATE * mean(means, weights)
    return params


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(2, 4),
    workers=st.integers(5, 7),
    even=st.booleans(),
)
def test_rounds_are_the_mean_of_the_racks_means(seed, size, workers, even):
    """Bit for bit, whatever the network does; and synchronous SGD but for rounding."""
    tokens = (lambda worker: 1.0) if even else (lambda worker: 1.0 + worker)
    problem = Quadratic(tokens=tokens)
    found = simulated(
        BSP(), size=size, workers=workers, problem=problem, seed=seed, link=BAD, noise=0.5
    )
    assert_same(found.params, two_level(size, workers, 5, tokens))
    if even:
        for name, array in synchronous(workers, 5).items():
            np.testing.assert_allclose(found.params[name], array, rtol=1e-12, atol=1e-12)


def test_the_servers_receive_less_by_the_size_of_a_rack():
    plain, racks = (simulated(BSP(), size=size, workers=8, link=INSTANT) for size in (0, 4))
    size = 8 * 13
    headers = 2 * 2 * 5 * 2 * HEADER_BYTES  # of two racks' pulls and pushes to two servers
    assert sum(racks.received_bytes) == 2 * 5 * size + headers
    assert sum(plain.received_bytes) == 4 * sum(racks.received_bytes)
    # Of its workers 4 pulls, 4 pushes; of the servers an answer and an acknowledgement each.
    (first, second) = racks.rack_received_bytes
    assert first == second == 5 * (4 * size + size) + 2 * 5 * (8 + 2) * HEADER_BYTES
    assert plain.rack_received_bytes == ()


MODELS = {
    "bsp": BSP(),
    "ssp": SSP(bound=2),
    "ahead": SSP(bound=3, reads="ahead"),
    "async": Asynchronous(delay_compensation=DelayCompensation()),
    "adaptive": AdaptiveSSP(least=0, most=3),
    "decoupled": Decoupled(local_steps=3, quorum=2, grace_seconds=0.5),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.every(3)
def test_one_seed_gives_one_run(name, pooled):
    """With stragglers, a bad network, and a rack of whom all workers die and come back."""

    def run(seed):
        return simulated(
            MODELS[name],
            workers=5,
            steps=8,
            seed=seed,
            pooled=pooled,
            link=BAD,
            noise=0.3,
            stragglers=(Straggler(worker=1, factor=4.0),),
            crashes=tuple(
                Crash(worker=worker, at_seconds=0.7, back_seconds=4.5) for worker in (2, 3)
            ),
        )

    first, again, other = run(0), run(0), run(1)
    assert_same(again.params, first.params)
    assert again.as_json() == first.as_json() != other.as_json()
    json.dumps(first.as_json(), allow_nan=False)
    assert [one.crashes for one in first.work] == [0, 0, 1, 1, 0]
    assert first.curve[-1].loss < first.curve[0].loss  # by how much is chance, in so few updates


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    bound=st.integers(0, 4),
    slow=st.sampled_from([1.0, 3.0, 20.0]),
    reads=st.sampled_from(["eager", "lazy", "each_clock", "ahead"]),
)
def test_no_rack_reads_older_than_the_bound(seed, bound, slow, reads):
    found = simulated(
        SSP(bound=bound, reads=reads),
        seed=seed,
        link=BAD,
        noise=0.5,
        stragglers=(Straggler(worker=0, factor=slow),),
        crashes=(Crash(worker=1, at_seconds=0.3, back_seconds=0.9),),
    )
    assert found.reads >= 2 * 3 * 5
    assert found.largest_lead <= bound


def test_a_nan_of_one_worker_leaves_the_rest_of_its_rack():
    class Broken(Quadratic):
        def gradient(self, params, worker, step):
            found = super().gradient(params, worker, step)
            if (step == 2 and worker == 1) or (step == 3 and worker in (2, 3)):
                found.gradient["b"] = np.float64("nan")
            return found

    found = simulated(BSP(), problem=Broken(), servers=1)
    assert np.isfinite(found.params["b"])
    # At the server: of the rack that had nothing else.
    assert found.dropped == {"the push contains a NaN or an infinity": 1}
    assert sum(found.staleness.values()) == 3 * 5 - 1


def test_what_racks_cannot_do():
    with pytest.raises(
        ConfigError, match="value_bound limits the unacknowledged changes of each worker"
    ):
        simulated(Asynchronous(reads="ahead", value_bound=1.0))
    with pytest.raises(ConfigError, match="all 6 workers in a single rack"):
        simulated(BSP(), size=6)
