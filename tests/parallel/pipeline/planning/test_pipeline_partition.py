"""Cuts of a model against all cuts there are."""

from itertools import combinations, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.planning.partition import LayerCosts, live_counts, partition
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.schedule import loop, v_shape
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v


def all_cuts(layers, chunks):
    for inner in combinations(range(1, layers), chunks - 1):
        yield tuple(high - low for low, high in pairwise((0, *inner, layers)))


def times_and_bytes(layers, counts, live):
    times, memory, at = [], [], 0
    for chunk, count in enumerate(counts):
        run = range(at, at + count)
        at += count
        first, last = chunk == 0, chunk == len(counts) - 1
        times.append(
            sum(layers.seconds[n] for n in run)
            + first * layers.first_seconds
            + last * layers.last_seconds
        )
        memory.append(
            sum(layers.state_bytes[n] + live[chunk] * layers.activation_bytes[n] for n in run)
            + first * layers.first_bytes
            + last * layers.last_bytes
        )
    return times, memory


numbers = st.integers(0, 9)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 5))
def test_no_cut_is_better(data, depth, chunks):
    if chunks > depth:
        return

    def lists():
        return data.draw(st.lists(numbers, min_size=depth, max_size=depth))

    layers = LayerCosts(lists(), lists(), lists(), *(data.draw(numbers) for _ in range(4)))
    live = data.draw(st.lists(st.integers(1, 4), min_size=chunks, max_size=chunks))
    caps = data.draw(st.lists(st.integers(5, 120), min_size=chunks, max_size=chunks))
    within = []
    for counts in all_cuts(depth, chunks):
        times, memory = times_and_bytes(layers, counts, live)
        if all(taken <= cap for taken, cap in zip(memory, caps, strict=True)):
            within.append((max(times), sum(time**2 for time in times)))
    if not within:
        with pytest.raises(
            ConfigError, match=f"no division of {depth} layers into {chunks} chunks"
        ):
            partition(layers, range(chunks), cap_bytes=caps, live=live)
        return
    found = partition(layers, range(chunks), cap_bytes=caps, live=live)
    times, memory = times_and_bytes(layers, found.counts, live)
    assert found.exact
    assert found.seconds == tuple(times)
    assert found.stage_bytes == tuple(memory)
    assert all(taken <= cap for taken, cap in zip(memory, caps, strict=True))
    assert max(times) == min(within)[0]
    assert sum(time**2 for time in times) == min(within)[1]


def test_the_slowest_chunk_comes_before_evenness():
    """9, 6, 2 has the smaller sum of squares, 121 for 129."""
    assert partition(LayerCosts([1, 8, 6, 2]), range(3)).seconds == (1, 8, 8)


def test_a_head_makes_its_chunk_shorter():
    found = partition(LayerCosts([1.0] * 16, first_seconds=0.5, last_seconds=2.5), range(4))
    assert found.counts == (4, 5, 5, 2)
    assert found.seconds == (4.5, 5, 5, 4.5)
    assert found.bounds == (0, 4, 9, 14, 16)


def test_memory_moves_layers_to_stages_that_keep_less():
    """1F1B keeps p - rank microbatches: with room for 8 GB the first stage takes fewer layers."""
    live = live_counts(one_f_one_b(4, 8))
    layers = LayerCosts([1.0] * 16, [1e9] * 16, [0.5e9] * 16)
    assert live == (4, 3, 2, 1)
    assert partition(layers, range(4), live=live).counts == (4, 4, 4, 4)
    found = partition(layers, range(4), live=live, cap_bytes=10e9)
    assert found.counts == (3, 4, 4, 5)
    assert found.stage_bytes == (9e9, 10e9, 8e9, 7.5e9)
    lines = found.explain().splitlines()
    assert lines[1].split() == ["0", "0", "0-2", "(3)", "3"]
    assert lines[5] == "slowest: chunk 3, 5; mean 4; even counts would give 4"
    assert lines[6] == "least free memory: stage 1, 0 GB (10 of 10 GB used)"
    assert lines[7] == "no other division into chunks within the memory has a faster slowest chunk"


def test_chunks_that_share_a_stage():
    """A V: first and last chunk share a stage. Where the fastest cut fits, it is taken as it is."""
    layers = LayerCosts([1.0] * 7, [1e9] * 7, last_bytes=2e9)
    found = partition(layers, v_shape(2), cap_bytes=[5e9, 4e9])
    assert (found.counts, found.stage_bytes, found.exact) == ((1, 2, 2, 2), (5e9, 4e9), True)


def test_even_shares_are_owned_up_to():
    layers = LayerCosts([3.0, 1.0, 1.0, 1.0, 3.0], [1e9] * 5)
    assert partition(layers, loop(2, 4)).counts == (1, 1, 2, 1)
    found = partition(layers, loop(2, 4), cap_bytes=[2e9, 4e9])
    assert found.counts == (1, 2, 1, 1)
    assert not found.exact
    assert "a faster division may exist" in found.explain()


def test_live_counts():
    assert live_counts(gpipe(2, 5)) == (5, 5)
    assert live_counts(zb_v(2, 8)) == (4, 3, 2, 1)


def test_layers_that_cannot_fill_the_chunks():
    with pytest.raises(ConfigError, match=r"3 layers cannot fill 4 chunks: use at most 3 chunks"):
        partition(LayerCosts([1.0] * 3), range(4))


def test_nothing_fits():
    with pytest.raises(
        ConfigError,
        match=r"no division of 4 layers into 2 chunks fits .* 2 stages have 5 GB \(the smallest "
        r"2\.5 GB\), but .* state alone needs 5 GB\. .*up to 3 microbatches are kept",
    ):
        partition(
            LayerCosts([1.0] * 4, [1e9] * 4, [1e8] * 4, last_bytes=1e9),
            (0, 1),
            cap_bytes=2.5e9,
            live=(3, 1),
        )


@pytest.mark.parametrize(
    ("layers", "keywords", "message"),
    [
        (LayerCosts([1.0, -2.0]), {}, r"seconds of layer 1 is -2\.0"),
        (LayerCosts([1.0, 1.0], state_bytes=[1.0]), {}, r"state_bytes has 1 numbers for 2 layers"),
        (
            LayerCosts([1.0, 1.0], None, [1.0, float("nan")]),
            {},
            r"activation_bytes of layer 1 is nan",
        ),
        (LayerCosts([1.0, 1.0], first_bytes=-1.0), {}, r"first_bytes is -1\.0"),
        (LayerCosts([1.0, 1.0]), {"live": [1.0]}, r"live has 1 numbers for 2 chunks"),
        (LayerCosts([1.0, 1.0]), {"cap_bytes": [1.0]}, r"1 memory caps for 2 stages"),
    ],
)
def test_numbers_that_are_wrong(layers, keywords, message):
    with pytest.raises(ConfigError, match=message):
        partition(layers, (0, 1), **keywords)


def test_a_deep_model_in_many_chunks():
    found = partition(LayerCosts([1.0 + (n % 7) / 10 for n in range(128)]), loop(16, 64))
    assert sum(found.counts) == 128
    assert max(found.seconds) <= found.even_seconds
