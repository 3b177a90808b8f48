"""Placements against their bounds, brute force, and what may move."""

from collections import Counter
from itertools import product

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.build import PlacementConfig
from jaxdist.param_server.placement.central import Central
from jaxdist.param_server.placement.contract import Placement, least_bytes
from jaxdist.param_server.placement.hashed import Hashed
from jaxdist.param_server.placement.ranges import PlaceableTensor, cut_ranges, placeable_tensors


def moved_bytes(before: Placement, after: Placement) -> dict[tuple[int, int], int]:
    """The bytes that move between two placements of the same ranges, by servers (from, to)."""
    assert before.ranges == after.ranges, "placements of other ranges"
    found: Counter[tuple[int, int]] = Counter()
    for part, old, new in zip(before.ranges, before.owners, after.owners, strict=True):
        if old != new:
            found[old, new] += part.size_bytes
    return dict(found)


def tensors(*sizes):
    return [PlaceableTensor(f"t{number}", 1, size) for number, size in enumerate(sizes)]


def fullest(placement):
    return max(placement.bytes_by_server.values())


@st.composite
def trees(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1))
    return [
        PlaceableTensor(f"t{n}", rows, rows * width * 4) for n, (rows, width) in enumerate(shapes)
    ]


@given(trees(), st.integers(1, 300) | st.none())
def test_ranges_are_the_rows_of_each_tensor_once_and_in_order(given, range_bytes):
    ranges = cut_ranges(given, range_bytes)
    for tensor in given:
        own = [found for found in ranges if found.name == tensor.name]
        assert [row for found in own for row in range(found.start, found.stop)] == [
            *range(tensor.rows)
        ]
        assert sum(found.size_bytes for found in own) == tensor.size_bytes
        rows = {found.stop - found.start for found in own}
        assert max(rows) - min(rows) <= 1
        if range_bytes is None:
            assert len(own) == 1
        else:
            row_bytes = tensor.size_bytes // tensor.rows
            assert all(found.size_bytes < max(range_bytes, 1) + row_bytes for found in own)
            assert len(own) == min(tensor.rows, -(-tensor.size_bytes // range_bytes))


def test_a_tensor_whose_update_needs_all_of_it_stays_whole():
    (found,) = cut_ranges([PlaceableTensor("w", 100, 400, divisible=False)], 4)
    assert found.key == "w[0:100]"


def test_tensors_of_a_tree():
    tree = {"b": np.zeros(3, np.float32), "s": jax.ShapeDtypeStruct((), "bfloat16")}
    assert [(t.rows, t.size_bytes) for t in placeable_tensors(tree)] == [(3, 12), (1, 2)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=7), st.integers(1, 3))
def test_balanced_keeps_its_bounds_beside_brute_force(sizes, servers):
    found = Balanced().place(tensors(*sizes), range(servers))
    best = min(
        max(sum(s for s, at in zip(sizes, where, strict=True) if at == n) for n in range(servers))
        for where in product(range(servers), repeat=len(sizes))
    )
    assert found.bound_bytes <= best <= fullest(found)
    assert 3 * servers * fullest(found) <= (4 * servers - 1) * best
    assert servers * fullest(found) <= sum(sizes) + (servers - 1) * max(sizes)
    assert all(found.held(server) for server in range(servers))


def test_the_bounds_that_count_differ():
    """Two of three share a server; the largest alone; the mean."""
    assert least_bytes([3, 3, 3], 2) == 6
    assert least_bytes([9, 1, 1], 2) == 9
    assert least_bytes([2, 2, 2, 2, 2, 2], 2) == 6
    assert least_bytes([4], 2) == 4


def test_cut_by_rows_a_large_tensor_is_shared_evenly():
    rule = Balanced(range_bytes=1024)
    found = rule.place([PlaceableTensor("embed", 1024, 1 << 20), *tensors(512, 256)], range(8))
    assert fullest(found) <= found.bound_bytes + 1024
    assert (
        fullest(Balanced(range_bytes=None).place([PlaceableTensor("e", 8, 800), *tensors(8)], [0]))
        == 808
    )


SEEDS = range(12)


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_a_server_that_joins_moves_its_share_and_no_more(servers):
    """Over seeds: about 1/(n+1) of the bytes on average, each time within four of the spreads that
    as many places make, and all of it to the server that joins."""
    rule, weights = Hashed(range_bytes=4), [PlaceableTensor("w", 2000, 8000)]
    moved = []
    for seed in SEEDS:
        seeded = rule.model_copy(update={"seed": seed})
        before, after = (seeded.place(weights, range(n)) for n in (servers, servers + 1))
        found = moved_bytes(before, after)
        assert {to for _, to in found} == {servers}
        assert {source for source, _ in found} == set(range(servers))
        moved.append(sum(found.values()) / 8000)
    share = 1 / (servers + 1)
    spread = share / np.sqrt(rule.virtual_nodes)
    assert np.mean(moved) == pytest.approx(share, abs=4 * spread / np.sqrt(len(SEEDS)))
    assert max(moved) <= share + 4 * spread


def test_a_server_that_leaves_moves_only_what_it_held():
    rule, weights = Hashed(range_bytes=4), [PlaceableTensor("w", 1000, 4000)]
    before = rule.place(weights, [0, 1, 2, 3, 4])
    found = moved_bytes(before, rule.place(weights, [0, 1, 3, 4]))
    assert set(found) == {(2, 0), (2, 1), (2, 3), (2, 4)}
    assert sum(found.values()) == before.bytes_by_server[2]


def test_more_places_make_shares_more_even():
    """The spread of shares falls about as one over the root of the places."""
    weights = [PlaceableTensor("w", 2000, 8000)]

    def spread(nodes):
        shares = [
            size / 8000 * 8
            for seed in SEEDS
            for size in Hashed(range_bytes=4, virtual_nodes=nodes, seed=seed)
            .place(weights, range(8))
            .bytes_by_server.values()
        ]
        return np.std(shares)

    one, many = spread(4), spread(64)
    assert 2.5 < one / many < 6.5


def test_balanced_moves_more_than_hashed():
    rng = np.random.default_rng(0)
    weights = tensors(*(int(size) for size in rng.integers(1, 1000, 200)))
    rules = Balanced(), Hashed()
    moved = [
        sum(moved_bytes(rule.place(weights, range(4)), rule.place(weights, range(5))).values())
        for rule in rules
    ]
    assert moved[0] > 2 * moved[1]


def test_a_placement_does_not_depend_on_the_order_of_servers():
    for rule in Balanced(), Hashed():
        assert rule.place(tensors(3, 2, 1), [2, 0, 1]) == rule.place(tensors(3, 2, 1), [0, 1, 2])


def test_central_holds_everything():
    found = Central().place(tensors(3, 2), [7])
    assert found.bytes_by_server == {7: 5}
    assert "a single server holds all parameters" in found.explain()


def test_an_explanation_names_the_fullest_and_what_is_cut():
    parts = [PlaceableTensor(f"w{n}", 2, 2_000_000) for n in range(6)]
    text = Hashed(range_bytes=1_000_000).place(parts, range(2)).explain()
    assert "cut by rows: w0 (2), w1 (2), w2 (2), w3 (2) and 2 more" in text
    assert "1/3 of the bytes" in text
    assert "mean 6 MB; lower bound for these ranges 6 MB" in text


REFUSED = {
    "more servers than ranges": (
        lambda: Balanced().place(tensors(3, 2), range(3)),
        r"3 servers, but 2 parameters make only 2 ranges \(range_bytes 4194304\): use at most 2",
    ),
    "no server": (lambda: Balanced().place(tensors(3), []), r"servers \[\]: name at least one"),
    "a server twice": (lambda: Hashed().place(tensors(3), [1, 1]), r"\[1, 1\]: .* none twice"),
    "central on two": (
        lambda: Central().place(tensors(3, 2), [0, 1]),
        r"but there are 2 servers: set one",
    ),
    "one name twice": (
        lambda: cut_ranges([*tensors(1), *tensors(1)], 4),
        r"two parameters have the name 't0'",
    ),
    "empty": (
        lambda: cut_ranges([PlaceableTensor("w", 0, 0)], 4),
        r"'w' has 0 rows, 0 bytes: .* leave the parameter out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case):
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()


class Holder(BaseModel):
    placement: PlacementConfig


@pytest.mark.parametrize("kind", [Central, Balanced, Hashed])
def test_a_config_chooses_by_type(kind):
    name = kind.model_fields["type"].default
    found = validate(Document({"placement": {"type": name, "range_bytes": 7}}), Holder)
    assert found.placement == kind(range_bytes=7)


def test_a_config_refuses_what_is_not_a_placement():
    with pytest.raises(ConfigError, match=r"placement\.virtual_nodes = 0"):
        validate(Document({"placement": {"type": "hashed", "virtual_nodes": 0}}), Holder)
