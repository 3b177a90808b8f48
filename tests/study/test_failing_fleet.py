"""A simulated fleet against closed forms, and against one that is simulated event by event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdist.heartbeat import intervals
from jaxdist.metrics.account import Activity
from jaxdist.simulation.failing_fleet import (
    FleetConfig,
    Saves,
    first_order,
    simulate_fleet,
    snapshots_with,
)

SHORT = FleetConfig(days=3.0, runs=4)


def fleet_of(mttf: float, **settings) -> FleetConfig:
    """One whose failures come at this mean, for as long as some ten thousand of them take."""
    rate = 1000 * intervals.DAY_SECONDS / mttf
    days = 500 * mttf / intervals.DAY_SECONDS
    return FleetConfig(devices=1, failures_per_1000_device_days=rate, days=days, **settings)


def mean(fleet: FleetConfig, saves: Saves) -> float:
    (found,) = simulate_fleet(fleet, [saves])
    return found.shares[Activity.STEP]


@settings(max_examples=15, derandomize=True)
@given(st.floats(0.002, 0.1), st.floats(0.25, 3), st.floats(0, 0.3), st.integers(0, 99))
def test_checkpoints_alone_agree_with_the_closed_form(cost, factor, recovery, seed):
    mttf = 1e4
    times = {"detect_seconds": 0.2, "restart_seconds": 0.5, "restore_seconds": 0.3}
    times = {name: part * recovery * mttf for name, part in times.items()}
    fleet = fleet_of(mttf, seed=seed, checkpoint_seconds=cost * mttf, **times)
    every = factor * intervals.young(cost * mttf, mttf)
    exact = intervals.goodput(every, cost * mttf, mttf, recovery * mttf)
    assert mean(fleet, Saves(every)) == pytest.approx(exact, rel=0.03)


@settings(max_examples=8, derandomize=True)
@given(st.integers(2, 12), st.floats(100, 2000), st.integers(0, 99))
def test_two_tiers_agree_with_the_closed_form_at_both_ends(disk, every, seed):
    """All failures take both copies, so that a cycle is one long save; or none does."""
    times = {"checkpoint_seconds": 200, "snapshot_seconds": 20, "seed": seed}
    lost = fleet_of(1e4, both_copies_lost=1, **times)
    cost = (disk - 1) * 20 + 200
    exact = intervals.goodput(disk * every, cost, lost.mttf, lost.recovery)
    assert mean(lost, Saves(every, disk)) == pytest.approx(exact, rel=0.05, abs=0.002)
    safe = fleet_of(1e4, both_copies_lost=0, **times)
    costs = [20] * (disk - 1) + [200]
    spent = [intervals.expected(every, c, safe.mttf, safe.memory_recovery) for c in costs]
    assert mean(safe, Saves(every, disk)) == pytest.approx(disk * every / sum(spent), rel=0.03)


def test_the_first_order_is_near_where_failures_are_rare():
    fleet = fleet_of(1e5, runs=40)
    for every in (200.0, 500.0, 1000.0):
        way = snapshots_with(fleet, every)
        assert mean(fleet, way) == pytest.approx(first_order(fleet, way), rel=0.01)


def step_by_step(fleet: FleetConfig, way: Saves) -> list[float]:
    """Work that is kept of each run, one save after another, with the same failures."""
    rng, horizon = np.random.default_rng(fleet.seed), fleet.days * intervals.DAY_SECONDS
    ends = [0.0] * fleet.runs
    kept, safe, since = ([0.0] * fleet.runs for _ in range(3))
    down, from_disk = [0.0] * fleet.runs, [False] * fleet.runs
    while any(end < horizon for end in ends):
        gaps = rng.exponential(fleet.mttf, fleet.runs)
        both = rng.random(fleet.runs) < fleet.both_copies_lost
        for run in range(fleet.runs):
            if ends[run] >= horizon:
                continue
            left = min(gaps[run], horizon - ends[run])
            ends[run] += left
            recovered = left >= down[run]
            left = max(left - down[run], 0.0)
            count, undone = round(since[run] / way.every), 0.0
            while left > 0:
                undone = min(left, way.every)
                left -= undone
                last = count == way.disk - 1
                cost = fleet.checkpoint_seconds if last else fleet.snapshot_seconds
                if undone < way.every or left < cost:
                    break
                left, undone, count = left - cost, 0.0, 0 if last else count + 1
                since[run] += way.every
                if last:
                    safe[run], since[run] = safe[run] + since[run], 0.0
            if ends[run] >= horizon:
                kept[run] = safe[run] + since[run] + undone
                down[run] = 0.0
                continue
            disk = bool(both[run]) or way.disk == 1
            since[run] = 0.0 if disk else since[run]
            from_disk[run] = disk or (from_disk[run] and not recovered)
            down[run] = fleet.recovery if from_disk[run] else fleet.memory_recovery
    return kept


@settings(max_examples=30)
@given(
    st.floats(300, 1e5), st.floats(20, 5000), st.integers(1, 9), st.floats(0, 1), st.integers(0, 9)
)
@example(600.0, 50.0, 3, 0.5, 0)  # many a recovery is cut short
def test_all_at_once_is_one_save_after_another(mttf, every, disk, chance, seed):
    rate = 1000 * intervals.DAY_SECONDS / mttf
    fleet = FleetConfig(
        devices=1,
        failures_per_1000_device_days=rate,
        days=1.0,
        runs=2,
        seed=seed,
        both_copies_lost=chance,
    )
    way = Saves(every, disk)
    (found,) = simulate_fleet(fleet, [way])
    expected = step_by_step(fleet, way)
    assert found.seconds[Activity.STEP] == pytest.approx(np.array(expected), abs=0.1)
    total = sum(found.seconds.values())
    assert total == pytest.approx(np.full(2, intervals.DAY_SECONDS), abs=0.1)
    assert min(spent.min() for spent in found.seconds.values()) >= -0.1


def test_the_same_seed_gives_the_same_failures_to_all():
    ways = [Saves(500.0), Saves(900.0, 4)]
    first, again = simulate_fleet(SHORT, ways), simulate_fleet(SHORT, ways)
    assert all((a.goodput == b.goodput).all() for a, b in zip(first, again, strict=True))
    assert (first[0].failures == first[1].failures).all()
    other = simulate_fleet(SHORT.model_copy(update={"seed": 1}), ways)
    assert (other[0].failures != first[0].failures).any()


def test_llama_3s_fleet_fails_as_often_as_was_told():
    (found,) = simulate_fleet(FleetConfig(), [Saves(1000.0)])
    assert found.failures.mean() == pytest.approx(466, rel=0.03)
