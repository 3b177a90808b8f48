from __future__ import annotations

import math

import pytest

from jaxdist.collectives import DoubleTree, Halving, Hierarchical, Ring, Tree, Xla
from jaxdist.collectives.contract import KINDS
from jaxdist.collectives.cost import Level, predict_seconds, slowest
from jaxdist.runtime.hardware import Link

SWITCH = Link(1e-5, 1e9)
TORUS = Link(1e-6, 1e10, "torus")
MEMORY = Link(1e-4, 1e9, "memory")
SLOW = Link(1e-3, 1e7)
FLAT = (Xla(), Ring(), Ring(directions=2), Tree(), DoubleTree(), Halving())
S = 8e6


def seconds(algorithm, link, size=8, payload_bytes=S, kind="all_reduce"):
    return predict_seconds(algorithm, kind, payload_bytes, [Level(size, link)])


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 64])
def test_a_ring_takes_its_steps_and_its_bytes(size):
    wire = 2 * (size - 1) / size * S / 1e9
    assert seconds(Ring(), SWITCH, size) == pytest.approx(2 * (size - 1) * 1e-5 + wire)


@pytest.mark.parametrize("algorithm", FLAT, ids=lambda a: a.type)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", [SWITCH, TORUS, MEMORY], ids=lambda link: link.topology)
def test_more_bytes_take_longer_and_one_device_takes_nothing(algorithm, kind, link):
    small, large = (seconds(algorithm, link, 8, b, kind) for b in (1e3, 1e6))
    assert 0 < small < large
    assert seconds(algorithm, link, 1, 1e6, kind) == 0


def test_both_directions_halve_the_wire_only_where_there_are_two_ports():
    one, both = (seconds(Ring(directions=d), TORUS, 9, 9e9) for d in (1, 2))
    assert one / both == pytest.approx(2)
    one, both = (seconds(Ring(directions=d), SWITCH, 9, 9e9) for d in (1, 2))
    assert both / one == pytest.approx(1, rel=1e-4)


def test_far_messages_cost_each_link_of_a_torus_that_they_pass():
    # Devices 1, 2 and 4 further on: 7 links in 3 steps.
    on_switch = seconds(Halving(), Link(1e-6, 5e9))
    assert seconds(Halving(), Link(1e-6, 5e9, "torus")) == pytest.approx(7 / 3 * on_switch)
    assert seconds(Halving(), TORUS) > seconds(Ring(), TORUS)


def test_xla_is_taken_to_be_as_good_as_the_best_flat_one():
    assert seconds(Xla(), SWITCH) == seconds(Halving(), SWITCH) < seconds(Ring(), SWITCH)
    assert seconds(Xla(), TORUS) == seconds(Ring(directions=2), TORUS)
    assert seconds(Xla(), MEMORY) == pytest.approx(1e-4 + S / 1e9)


def test_a_flat_call_over_two_levels_runs_at_the_pace_of_the_slow_one():
    levels = [Level(2, SLOW), Level(4, SWITCH)]
    assert predict_seconds(Ring(), "all_reduce", S, levels) == seconds(Ring(), SLOW)


def test_hierarchical_is_the_sum_of_its_phases_each_on_its_link():
    levels = [Level(2, SLOW), Level(4, SWITCH)]
    expected = (
        seconds(Ring(), SWITCH, 4, S, "reduce_scatter")
        + seconds(Tree(), SLOW, 2, S / 4)
        + seconds(Ring(), SWITCH, 4, S, "all_gather")
    )
    algorithm = Hierarchical(inside=Ring(), across=Tree())
    assert predict_seconds(algorithm, "all_reduce", S, levels) == pytest.approx(expected)


def test_hierarchical_beats_a_flat_ring_by_what_the_slow_link_is_spared():
    """4 x 8 devices and no latency: 2 (31/32) S against 2 (3/4) S/8 on the slow link."""
    levels = [Level(4, Link(0, 1e6)), Level(8, Link(0, 1e15))]
    flat, nested = (
        predict_seconds(algorithm, "all_reduce", S, levels)
        for algorithm in (Ring(), Hierarchical())
    )
    assert flat / nested == pytest.approx((31 / 32) / (3 / 4 / 8), rel=1e-6)


def test_the_slowest_link_ignores_axes_of_one_device():
    assert slowest([Level(1, SLOW), Level(4, SWITCH)]) == SWITCH
    assert slowest([Level(2, SLOW), Level(4, SWITCH)]) == SLOW
    late = Link(1.0, 1e12)
    assert slowest([Level(2, late), Level(4, SWITCH)]) == Link(1.0, 1e9)
    assert slowest([Level(1, SLOW)]) == SLOW


def test_latency_decides_small_ones_and_bytes_large_ones():
    assert seconds(Tree(), SWITCH, 8, 8) < seconds(Ring(), SWITCH, 8, 8)
    assert seconds(Tree(), SWITCH, 8, 8e8) > seconds(Ring(), SWITCH, 8, 8e8)
    assert math.isclose(seconds(Tree(), SWITCH, 8, 0), 6e-5)
