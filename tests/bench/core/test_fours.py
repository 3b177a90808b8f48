"""Ratios of A B B A: drifts cancel, outliers do not count, the interval has the truth."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.core.fours import fours, ratio_of
from benchmarks.core.harness import Sample


def measured(count: int, true: float, noise: float, drift: float, seed: int):
    """Pairs as `interleave` takes them, on a machine that slows down and is interrupted."""
    rng, a, b, at = random.Random(seed), [], [], 0
    for index in range(count):
        for ours in (index % 2 == 0, index % 2 == 1):
            slow = 1 + drift * at + (rng.random() < 0.05) * 3.0
            (a if ours else b).append((true if ours else 1.0) * slow * (1 + rng.gauss(0, noise)))
            at += 1
    return Sample(tuple(a)), Sample(tuple(b))


def test_an_even_drift_cancels_out():
    ours, reference = measured(2, 1.5, 0.0, 0.0, 3)
    assert fours(ours, reference) == [1.5]
    rising = [1.0 + 0.1 * at for at in range(8)]
    a = Sample((rising[0], rising[3], rising[4], rising[7]))
    b = Sample((rising[1], rising[2], rising[5], rising[6]))
    assert fours(a, b) == pytest.approx([1.0, 1.0])


def test_the_interval_has_the_truth_about_as_often_as_it_says():
    found = [ratio_of(*measured(60, 1.01, 0.03, 0.001, seed)) for seed in range(40)]
    assert sum(one.low <= 1.01 <= one.high for one in found) >= 34
    assert all(one.low <= one.median <= one.high and one.fours == 30 for one in found)
    assert sum(one.high - one.low for one in found) / 40 < 0.04


def test_nothing_is_known_of_a_single_pair():
    found = ratio_of(Sample((1.0,)), Sample((1.0,)))
    assert math.isnan(found.median)
    assert found.fours == 0


def test_what_it_says_of_a_limit():
    sure = ratio_of(Sample((1.0, 1.0)), Sample((1.0, 1.0)))
    assert sure.against(1.02) == "95% of 1.000 to 1.000; 1 times ABBA"
