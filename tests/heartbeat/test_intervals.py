"""Closed forms of how often to save."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.heartbeat.intervals import daly, expected, goodput, mttf_of, young


def test_the_example_of_metas_clusters():
    """2,048 nodes, 6.5 failures in 1,000 node-days, 60 s for a checkpoint: each 883 s."""
    mttf = mttf_of(2048, 6.5 / 1000)
    assert round(young(60, mttf)) == 883


@pytest.mark.full
@given(st.floats(1e-4, 0.3))
def test_daly_is_the_best_of_the_exact_form(share):
    """To a percent of the interval and less of goodput, whatever the cost is of the mttf."""
    mttf, cost = 1e4, 1e4 * share
    works = np.geomspace(0.2, 3, 4001) * young(cost, mttf)
    gains = [goodput(work, cost, mttf, 500) for work in works]
    best = works[int(np.argmax(gains))]
    assert daly(cost, mttf) == pytest.approx(best, rel=0.03)
    assert goodput(daly(cost, mttf), cost, mttf, 500) == pytest.approx(max(gains), rel=1e-3)


def test_where_nothing_fails_only_saves_cost():
    assert goodput(300, 60, 1e12, 600) == pytest.approx(300 / 360)
    assert young(1, 1e4) == pytest.approx(daly(1, 1e4), rel=0.01)


def test_a_save_that_takes_longer_than_failures_leave():
    assert daly(200, 100) == 100
    assert expected(100, 200, 100, 0) > 10 * 300 / 3
