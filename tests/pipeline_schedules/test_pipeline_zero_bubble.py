"""The automatic zero-bubble scheduler: its memory, its bubble, and the figures of the paper."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.auto import zb_auto
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1, zb_h2

MODELS = {
    # arXiv 2401.10241 table 5: F, I, W and transfer in ms. The part of the activations that the
    # weight half needs follows from the models' widths and lengths (its section 2.3).
    "1.5B, 24 microbatches": (8, 24, Costs(18.522, 18.086, 9.337, transfer=0.601, kept=0.37)),
    "1.5B, 32 microbatches": (8, 32, Costs(18.513, 18.086, 9.331, transfer=0.626, kept=0.37)),
    "14.6B": (16, 48, Costs(11.347, 11.248, 8.132, transfer=0.377, kept=0.43)),
    "28.3B": (32, 96, Costs(10.419, 10.207, 7.715, transfer=0.408, kept=0.43)),
}


@pytest.mark.parametrize(
    ("model", "once", "twice"),
    [
        ("1.5B, 24 microbatches", 0.1585, 0.0446),
        ("1.5B, 32 microbatches", 0.1242, 0.0039),
        ("14.6B", 0.1397, 0.0066),
        ("28.3B", 0.1421, 0.0038),
    ],
)
@pytest.mark.every(3)
def test_bubbles_of_the_paper(model, once, twice):
    """In the memory of 1F1B, and in twice that; at most the paper's figures (table 4)."""
    stages, microbatches, costs = MODELS[model]
    for memory_limit, bubble in ((1.0, once), (2.0, twice)):
        made = zb_auto(stages, microbatches, costs, memory_limit=memory_limit, search=0)
        found = simulate(made, costs)
        assert found.peak <= memory_limit * stages + 1e-9
        assert found.bubble_fraction <= bubble + 5e-5


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
@pytest.mark.every(3)
def test_no_bubble_in_twice_the_memory(stages):
    """Equal times: none at all from 2 p - 1 microbatches on."""
    for microbatches in (2 * stages - 1, 2 * stages, 4 * stages):
        found = simulate(zb_auto(stages, microbatches))
        assert found.bubble == 0
        assert found.peak <= 2 * stages


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(2, 33))
def test_at_most_one_percent_in_twice_the_memory(stages):
    """Times a third apart, from four microbatches per stage on."""
    for times in ((1, 1, 1), (1, 1, 0.9), (1, 1.1, 1), (0.9, 1, 0.95)):
        costs = Costs(*times, kept=0.43)
        found = simulate(zb_auto(stages, 4 * stages, costs), costs)
        assert found.peak <= 2 * stages + 1e-9
        assert found.bubble_fraction <= 0.01


times = st.floats(0.5, 2.0)


@settings(max_examples=30)
@given(st.data(), st.integers(2, 6), st.integers(1, 16), st.floats(1.0, 2.5))
def test_memory_is_kept_and_nothing_is_lost(data, stages, microbatches, memory_limit):
    """Uneven stages: within the memory, and never longer than 1F1B."""

    def lists(values):
        return data.draw(st.lists(values, min_size=stages, max_size=stages))

    costs = Costs(
        lists(times), lists(times), lists(times),
        transfer=data.draw(st.floats(0, 0.3)),
        activation=lists(st.floats(0.5, 2.0)),
        kept=data.draw(st.floats(0, 1)),
    )  # fmt: skip
    found = simulate(
        zb_auto(stages, microbatches, costs, memory_limit=memory_limit, search=2), costs
    )
    unsplit = replace(costs, kept=0.0)
    assert found.peak <= memory_limit * simulate(one_f_one_b(stages, stages), unsplit).peak * 1.001
    assert found.period <= simulate(one_f_one_b(stages, microbatches), costs).period * (1 + 1e-9)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_no_worse_than_by_hand(stages):
    """Unequal times, all the memory that each hand-made schedule takes."""
    for costs in (Costs(3, 4, 2), Costs(5, 2, 2), Costs(2, 2, 1, transfer=0.25)):
        for build, memory_limit in ((zb_h1, 1.0), (zb_h2, 2.0)):
            hand = simulate(build(stages, 4 * stages), costs)
            found = simulate(zb_auto(stages, 4 * stages, costs, memory_limit=memory_limit), costs)
            assert found.period <= hand.period * (1 + 1e-9)


def test_search_helps():
    stages, microbatches, costs = MODELS["1.5B, 32 microbatches"]
    before, after = (
        simulate(zb_auto(stages, microbatches, costs, search=search), costs).bubble_fraction
        for search in (0, 30)
    )
    assert after < 0.8 * before < 0.004


def test_more_memory_than_there_are_microbatches():
    assert simulate(zb_auto(4, 2, memory_limit=50.0)).peak <= 2


@pytest.mark.parametrize(("memory_limit", "activations"), [(0.2, "0.8"), (0.0, "0"), (-1.0, "-4")])
def test_memory_for_less_than_one_microbatch(memory_limit, activations):
    with pytest.raises(
        ConfigError,
        match=rf"memory_limit {memory_limit:g} allows {activations} activations on 4 stages, but a "
        r"single microbatch keeps 1 on stage 0: set memory_limit to at least 0\.25",
    ):
        zb_auto(4, 8, memory_limit=memory_limit)


def test_the_least_memory():
    found = simulate(zb_auto(4, 8, memory_limit=0.25))
    assert found.peak == 1
