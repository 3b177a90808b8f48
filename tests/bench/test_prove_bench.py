"""The bench of proofs: a fault is planted, and reported, and gone again."""

from __future__ import annotations

import pytest

from benchmarks.prove import draws, mutations, report
from benchmarks.prove.faults import PLANS, faults
from benchmarks.prove.known import Known
from benchmarks.prove.mutations import Planted
from jaxdist.parallel.exchange import explicit

DROPPED = next(fault for fault in faults() if fault.becomes == "total = carried")


def test_each_fault_is_in_the_code_once_and_has_known_plans():
    for fault in faults():
        assert (mutations.ROOT / fault.file).read_text().count(fault.was) == 1, fault
        assert set(fault.plans) <= PLANS.keys()


def test_draws_begin_with_each_fault_and_are_equal_for_equal_seeds():
    pairs = mutations.drawn(3)
    assert [fault for fault, _ in pairs[: len(faults())]] == faults()
    assert pairs == mutations.drawn(3)
    assert len(pairs) == sum(len(fault.plans) for fault in faults()) >= report.FAULTS


def test_a_fault_is_planted_for_a_while():
    before = explicit.Explicit.sum.__code__
    with mutations.planted(DROPPED):
        assert explicit.Explicit.sum.__code__ is not before
    assert explicit.Explicit.sum.__code__ is before


@pytest.mark.full
def test_a_dropped_sum_is_reported_at_its_leaf():
    found = mutations.judged(DROPPED, "xla")
    assert found.changed
    assert found.found
    assert "layers/0" in found.types
    assert not found.numbers


def test_a_right_plan_has_no_alarm():
    found = draws.judged(3)
    assert (found.alarms, found.undecided, found.proved) == ((), (), found.leaves)


def test_figures_count_what_each_part_found():
    found = [
        Planted(DROPPED, "ring", types="here"),
        Planted(DROPPED, "xla", numbers="there"),
        Planted(DROPPED, "zero3"),
    ]
    figures = {one.name: (one.ours, one.holds) for one in report.faults_figures(found)}
    assert figures == {
        "planted faults reported": (2, False),
        "by types": (1, None),
        "by numbers, of the rest": (1, None),
    }
    assert report.faults_listing(found).rows[2][-2:] == ("", "")
    outcome = draws.Outcome(5, alarms=("tree.py:3: wrong",), leaves=2, proved=1)
    figure = report.alarms_figure([outcome, draws.Outcome(6)])
    assert (figure.ours, figure.reference, figure.holds) == (1, 2, False)
    assert "[5]" in figure.note


def test_figures_count_known_mistakes_and_right_trainers():
    found = Known("a report", "a mean of means", "wrong", ("a.py:3",), ("w",))
    missed = Known("a report", "a stale key", "undecided")
    trained = [Known("nnx", "", "proved"), Known("nnx", "a local norm", "wrong")]
    figures = report.known_figures([found, missed], trained)
    assert [(one.ours, one.reference, one.holds) for one in figures] == [
        (1, 2, False), (1, 1, True), (1, 1, True),
    ]  # fmt: skip
    assert report.known_listing([found]).rows[0][2:] == ("wrong", "a.py:3", "w")
