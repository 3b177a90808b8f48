"""What a report says of staleness, against what gradients were computed from."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulator import BAD, RATE, Quadratic

from jaxdist.param_server.aggregation import Direct, Racks
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP, AdaptiveSSP, Asynchronous
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.scenario import NetworkConfig, SimulationConfig, Straggler
from jaxdist.simulation.engine.problem import Sgd
from jaxdist.simulation.engine.run import simulate_training


class Traced(Quadratic):
    """Remembers what each gradient, or the mean of a rack's, was computed from."""

    start = {"w": np.ones(3)}  # noqa: RUF012

    def __init__(self, racks):
        super().__init__()
        self.racks, self.found, self.source = racks, {}, {}

    def gradient(self, params, worker, step):
        found = super().gradient(params, worker, step)
        self.found[worker, step] = found.gradient["w"], params["w"].tobytes()
        rack = next((one for one in self.racks if worker in one), (worker,))
        if all((other, step) in self.found for other in rack):
            arrays, sources = zip(*(self.found[other, step] for other in rack), strict=True)
            total = sum(arrays[1:], start=arrays[0])
            mean = total / len(rack) if len(rack) > 1 else total
            self.source[mean.tobytes()] = sources
        return found


class Counting:
    """Plain SGD that counts how many updates ago a gradient's parameters were the newest."""

    learning_rate, divisible = RATE, True

    def __init__(self, problem):
        self.sgd, self.problem = Sgd(RATE), problem
        self.versions, self.staleness = {}, Counter()

    def init(self, name, array):
        self.versions[array.tobytes()] = 0
        return

    def update(self, name, array, gradient, rate, state):
        now = self.versions[array.tobytes()]
        oldest = min(self.versions[source] for source in self.problem.source[gradient.tobytes()])
        self.staleness[now - oldest] += 1
        new, state = self.sgd.update(name, array, gradient, rate, state)
        self.versions[new.tobytes()] = now + 1
        return new, state


JITTER = NetworkConfig(latency_seconds=0.01, jitter_seconds=0.2)
MODELS = {
    "eager": SSP(bound=3, reads="eager"),
    "lazy": SSP(bound=3, reads="lazy"),
    "each clock": SSP(bound=3, reads="each_clock"),
    "ahead": SSP(bound=3, reads="ahead"),
    "async": Asynchronous(),
    "async ahead": Asynchronous(reads="ahead"),
    "adaptive": AdaptiveSSP(least=0, most=3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("racks", [False, True])
@settings(max_examples=4)
@given(seed=st.integers(0, 2**31), slow=st.sampled_from([1.0, 2.5]))
def test_staleness_is_that_of_what_was_computed_from(name, racks, seed, slow):
    """New parameters that come while a worker computes make its gradient no fresher."""
    aggregation = Racks(size=2) if racks else Direct()
    # A rack counts what it answered, also where the answer was lost and a newer one came.
    link = JITTER if racks else BAD
    cluster = Cluster(
        workers=4,
        consistency=MODELS[name],
        aggregation=aggregation,
        simulation=SimulationConfig(
            seed=seed, link=link, noise=0.4, stragglers=(Straggler(worker=0, factor=slow),)
        ),
    )
    problem = Traced(aggregation.racks(range(4)))
    rule = Counting(problem)
    found = simulate_training(cluster, problem, rule, clocks=8)
    assert found.staleness == rule.staleness
    assert found.staleness[0] < sum(found.staleness.values())


def test_rounds_are_never_stale():
    problem = Traced(())
    cluster = Cluster(workers=1, consistency=BSP())
    rule = Counting(problem)
    assert simulate_training(cluster, problem, rule, clocks=4).staleness == rule.staleness == {0: 4}
