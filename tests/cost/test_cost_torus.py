"""Collectives on the torus, against the formulas of the scaling book done by hand."""

import itertools
from types import SimpleNamespace

import pytest

from jaxdist.cost.torus import torus_of
from jaxdist.hlo.groups import MeshLayout
from jaxdist.hlo.ledger import ledger_of_text
from jaxdist.runtime.hardware import Link

FAST, SLOW = Link(0.0, 1e9, "torus"), Link(1.0, 1e6)


def chips(*shape, slices=1):
    places = itertools.product(range(slices), *map(range, reversed(shape)))
    return [SimpleNamespace(slice_index=s, coords=tuple(reversed(rest))) for s, *rest in places]


def collective(kind, axes, groups, elements=1000):
    """The record of one collective over some groups, read from a program of one line."""
    spelled = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    count = 1
    for size in axes.values():
        count *= size
    key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    text = (
        f"HloModule m, num_partitions={count}\n\nENTRY %e (p: f32[{elements}]) -> f32[1] {{\n"
        f"  %p = f32[{elements}] parameter(0)\n"
        f"  ROOT %c = f32[{elements}] {kind}(%p), channel_id=1, {key}={{{spelled}}}, "
        "use_global_device_ids=true\n}\n"
    )
    (found,) = ledger_of_text(text, axes).collectives
    return found


def seconds(shape, kind, axes, groups, *, slices=1, family="v5p"):
    torus = torus_of(chips(*shape, slices=slices), family, FAST, SLOW)
    return torus.transfer(collective(kind, axes, groups)).seconds


def everyone(count):
    return [list(range(count))]


def test_a_whole_torus_sends_through_all_six_links():
    # 64 chips, each contributes 4000 B: V = 256 kB, of which 63/64 arrive over 6 links.
    found = seconds((4, 4, 4), "all-gather", {"data": 64}, everyone(64))
    assert found == pytest.approx(4000 * 63 / 6e9)


def test_an_all_reduce_takes_twice_a_reduce_scatter():
    both = (
        seconds((4, 4, 4), kind, {"data": 64}, everyone(64))
        for kind in ("all-reduce", "reduce-scatter")
    )
    reduced, scattered = both
    assert reduced == pytest.approx(2 * scattered)


def test_a_line_has_one_direction():
    ring = seconds((16, 1), "all-gather", {"data": 16}, everyone(16), family="v5e")
    line = seconds((8, 1), "all-gather", {"data": 8}, everyone(8), family="v5e")
    assert ring == pytest.approx(4000 * 15 / 2e9)
    assert line == pytest.approx(4000 * 7 / 1e9)


def test_part_of_a_dim_is_a_line():
    groups = [[y * 4 + x for x in pair] for y in range(4) for pair in ((0, 1), (2, 3))]
    assert seconds((4, 4, 1), "all-gather", {"a": 8, "b": 2}, groups) == pytest.approx(4e-6)


def test_an_all_to_all_is_a_quarter_of_an_all_gather():
    # The same bytes arrive: V (n-1)/n of a tensor of V = 4000 B.
    found = seconds((4, 4, 4), "all-to-all", {"data": 64}, everyone(64))
    assert found == pytest.approx(4000 * 63 / 64 / 4 / 6e9)


def test_scattered_chips_have_one_link():
    groups = [[0, 5], [1, 4], [2, 7], [3, 6]]
    found = seconds((4, 2, 1), "all-reduce", {"data": 8}, groups)
    assert found == pytest.approx(4000 / 1e9)


def test_a_permute_shares_the_links_that_it_passes():
    near, far = (
        [[i, (i + hops) % 16] for i in range(16)] for hops in (1, 2)
    )  # 15 to 0 is one hop: the dim is a ring
    found = [
        seconds((16, 1), "collective-permute", {"data": 16}, pairs, family="v5e")
        for pairs in (near, far)
    ]
    assert found == pytest.approx([4e-6, 8e-6])


def test_a_link_carries_both_ways_at_once():
    """Messages up and down a ring share no link; what is gathered over the ring uses both."""
    torus = torus_of(chips(4, 1, 1), "v4", FAST, SLOW)
    line = [[(i, i + 1) for i in range(3)], [(i + 1, i) for i in range(3)]]
    up, down = (torus.transfer(collective("collective-permute", {"x": 4}, p)).links for p in line)
    both = torus.transfer(collective("all-gather", {"x": 4}, everyone(4))).links
    assert (up, down, both) == ({1}, {-1}, {1, -1})
    cube = torus_of(chips(4, 4, 4), "v5p", FAST, SLOW)
    wrapped = collective("collective-permute", {"x": 64}, [(i, (i + 1) % 4) for i in range(4)])
    assert len(cube.transfer(wrapped).links) == 1


def test_only_whole_cubes_close_to_rings():
    line = seconds((2, 2, 4), "all-gather", {"data": 16}, everyone(16))
    assert line == pytest.approx(4000 * 15 / 3e9)


def test_slices_are_joined_by_the_slow_network():
    groups = [[0, 4], [1, 5], [2, 6], [3, 7]]
    found = seconds((4, 1, 1), "all-reduce", {"slice": 2, "data": 4}, groups, slices=2)
    assert found == pytest.approx(1.0 + 4000 / 1e6)


def test_latency_is_the_way_of_the_first_byte():
    torus = torus_of(chips(4, 4, 4), "v5p", Link(1e-6, 1e30, "torus"), SLOW)
    one = collective("all-gather", {"data": 64}, everyone(64))
    assert torus.transfer(one).seconds == pytest.approx(6e-6)  # half of each ring


def test_a_group_of_one_takes_no_time():
    layout = MeshLayout({"data": 4}, (0, 1, 2, 3))
    assert layout.size(()) == 1
    assert seconds((4, 1, 1), "all-reduce", {"data": 4}, [[0], [1], [2], [3]]) == 0


def twins(*shape):
    """Chips of two devices each, as jax lists them."""
    return [
        SimpleNamespace(slice_index=0, coords=chip.coords, core_on_chip=core)
        for chip in chips(*shape)
        for core in range(2)
    ]


def test_two_devices_of_a_chip_share_its_links():
    torus = torus_of(twins(4, 4, 4), "tpu7x", FAST, SLOW)
    whole = torus.transfer(collective("all-gather", {"data": 128}, everyone(128)))
    # Of 128 pieces of 4000 B each goes into a chip once, over six links.
    assert whole.seconds == pytest.approx(4000 * 127 / 6e9)
    halves = [list(range(core, 128, 2)) for core in range(2)]
    each = torus.transfer(collective("all-gather", {"a": 64, "core": 2}, halves))
    assert each.seconds == pytest.approx(4000 * 63 / 3e9)
    pairs = [[2 * chip, 2 * chip + 1] for chip in range(64)]
    inside = torus.transfer(collective("all-gather", {"a": 64, "core": 2}, pairs))
    assert inside.seconds == pytest.approx(4000 / 6e9)
    assert not inside.links & {1, 2, 3, -1, -2, -3}
    near = torus.transfer(collective("collective-permute", {"a": 128}, [(0, 8), (1, 9)]))
    assert near.seconds == pytest.approx(4000 / 0.5e9)
