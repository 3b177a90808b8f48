"""Cuts of a model against all cuts there are."""

from itertools import accumulate, combinations, pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from jaxdist.parallel.pipeline.planning.partition import LayerCosts, partition
from jaxdist.pipeline_schedules.schedule import loop


def all_cuts(layers, chunks):
    for inner in combinations(range(1, layers), chunks - 1):
        yield tuple(high - low for low, high in pairwise((0, *inner, layers)))


def times(layers, counts):
    bounds = [*pairwise((0, *accumulate(counts)))]
    found = [sum(layers.seconds[low:high]) for low, high in bounds]
    found[0] += layers.first_seconds
    found[-1] += layers.last_seconds
    return found


numbers = st.integers(0, 9)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 8), st.integers(1, 5))
def test_no_cut_is_better(data, depth, chunks):
    if chunks > depth:
        return
    seconds = data.draw(st.lists(numbers, min_size=depth, max_size=depth))
    layers = LayerCosts(seconds, data.draw(numbers), data.draw(numbers))
    costs = [times(layers, counts) for counts in all_cuts(depth, chunks)]
    found = partition(layers, range(chunks))
    assert found.searched
    assert found.seconds == tuple(times(layers, found.counts))
    best = min((max(cost), sum(time**2 for time in cost)) for cost in costs)
    assert (max(found.seconds), sum(time**2 for time in found.seconds)) == best


def test_the_slowest_chunk_comes_before_evenness():
    """9, 6, 2 has the smaller sum of squares, 121 for 129."""
    assert partition(LayerCosts([1, 8, 6, 2]), range(3)).seconds == (1, 8, 8)


def test_a_head_makes_its_chunk_shorter():
    found = partition(LayerCosts([1.0] * 16, first_seconds=0.5, last_seconds=2.5), range(4))
    assert found.counts == (4, 5, 5, 2)
    assert found.seconds == (4.5, 5, 5, 4.5)
    assert found.bounds == (0, 4, 9, 14, 16)


def test_a_deep_model_in_many_chunks():
    found = partition(LayerCosts([1.0 + (n % 7) / 10 for n in range(128)]), loop(16, 64))
    assert sum(found.counts) == 128
    assert max(found.seconds) <= found.even_seconds
