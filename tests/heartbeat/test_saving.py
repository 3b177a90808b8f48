"""How often a run chooses to save."""

from __future__ import annotations

import pytest

from jaxdist.heartbeat import intervals
from jaxdist.heartbeat.saving import MOST_STEPS, Failures, choose_interval, failures_of, interval

PRIOR = Failures(mttf=86_400, recovery=7.0)
PARTS = ("stop", "restart", "restore", "first_step")


def begun(generation: int, time: float, seconds: float) -> dict:
    parts = {f"{part}_seconds": seconds / 4 for part in PARTS}
    return {"event": "begun", "generation": generation, "time": time, **parts}


def lost(generation: int, time: float) -> dict:
    return {"event": "lost", "generation": generation, "time": time}


def test_before_a_failure_the_prior_holds():
    assert failures_of([], 1e9, PRIOR) == PRIOR
    assert failures_of([begun(1, 100, 8)], 1e9, PRIOR) == PRIOR


def test_failures_are_those_of_the_journal():
    """It began at 92; until 392 there were three failures; recoveries took 4, 6 and 20 seconds."""
    events = [begun(1, 100, 8), lost(1, 150), begun(2, 154, 4), {"event": "stuck"}, lost(2, 200)]
    events += [begun(3, 206, 6), {"event": "slow"}, lost(3, 300), begun(4, 320, 20)]
    assert failures_of(events, 392, PRIOR) == Failures(100, 6, 3)
    # It was lost before it came to a step, so that nothing is known of recoveries.
    assert failures_of(events[:2], 192, PRIOR) == Failures(100, PRIOR.recovery, 1)


def test_daly_in_whole_steps():
    chosen = choose_interval(0.5, 0.1, Failures(3600, 10))
    assert chosen.steps == round(intervals.daly(0.5, 3600) / 0.1)
    assert chosen.predicted == intervals.goodput(chosen.work, 0.5, 3600, 10)
    # No other number of steps is predicted to keep more.
    for other in (chosen.steps // 2, chosen.steps * 2):
        assert interval(other, 0.5, 0.1, Failures(3600, 10)).predicted < chosen.predicted


@pytest.mark.parametrize(
    ("cost", "step_seconds", "failures"),
    [
        (0.0, 0.01, PRIOR),
        (1e-3, 0.0, PRIOR),
        (50.0, 10.0, Failures(1.0, 10.0)),
        (1e-3, 1e9, PRIOR),
    ],
    ids=["free", "no_time", "fails_all_the_time", "one_step_is_too_long"],
)
def test_extremes_are_whole_steps_too(cost, step_seconds, failures):
    assert 1 <= choose_interval(cost, step_seconds, failures).steps <= MOST_STEPS


def test_what_is_told():
    seen = choose_interval(0.004, 0.05, Failures(39.3, 8.3, 1)).words("a snapshot")
    assert seen == "a snapshot every 11 steps (0.55 s), which takes 4 ms; 1 failure seen, " + (
        "a failure every 39.3 s"
    )
