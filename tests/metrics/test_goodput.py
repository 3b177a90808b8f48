"""Lives of a run, joined from their records."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.goodput import (
    SPLIT,
    WORK,
    account_values,
    goodput_table,
    joined_lives,
    next_life,
)
from jaxdist.metrics.writer import MetricsWriter, append, read_metrics


class FakeRun:
    """A run on a clock of whole seconds: each step takes one, each save two, each start five."""

    def __init__(self) -> None:
        self.records, self.saved, self.now = [], 0, 1_000

    def live(self, steps: int, *, every: int, restores: bool = True) -> None:
        """A life that takes so many steps and is then killed."""
        begun = self.now
        account = Account(
            Activity.RECOVERY if self.saved and restores else Activity.START,
            begun=begun * 10**9,
            clock=lambda: self.now * 10**9,
        )
        self.saved = first = self.saved if restores else 0
        life = next_life(self.records)
        self.now += 5
        self.write(account, life, first)
        account.enter(Activity.STEP)
        for step in range(first + 1, first + steps + 1):
            self.now += 1
            self.write(account, life, step)
            if step % every == 0:
                with account.within(Activity.CHECKPOINT_BLOCKED):
                    self.now += 2
                self.saved = step
                self.write(account, life, step)

    def write(self, account: Account, life: int, step: int) -> None:
        values = account_values(account, life)
        self.records.append({"step": step, "split": SPLIT, "time": float(self.now), **values})


def seconds(found, kind):
    return pytest.approx(found.seconds[kind])


def test_what_had_to_be_done_again_is_lost_work():
    run = FakeRun()
    run.live(7, every=4)  # saves 4, takes 5 to 7
    run.now += 30
    run.live(6, every=4)  # from 4: saves 8, takes 9 and 10
    run.now += 20
    run.live(4, every=4)  # from 8 to 12
    found = joined_lives(run.records)
    assert found is not None
    assert [(life.first_step, life.last_step, life.kept_step) for life in found.lives] == [
        (0, 7, 4),
        (4, 10, 8),
        (8, 12, 12),
    ]
    assert found.lost_steps == 5
    assert seconds(found, Activity.STEP) == 12
    assert seconds(found, Activity.LOST_WORK) == 5
    assert seconds(found, Activity.CHECKPOINT_BLOCKED) == 6
    assert (seconds(found, Activity.START), seconds(found, Activity.RECOVERY)) == (5, 10)
    assert seconds(found, Activity.IDLE) == 50
    assert found.gaps_seconds == (30, 20)
    assert found.goodput == pytest.approx(12 / 88)
    assert "88.0 s" in goodput_table(found)
    assert "3 attempts, 5 steps repeated; goodput 13.6%" in goodput_table(found)


def test_a_save_that_was_not_committed_keeps_nothing():
    run = FakeRun()
    run.live(9, every=4)  # 4 and 8 are begun
    run.live(9, every=4, restores=False)  # and neither was whole
    found = joined_lives(run.records)
    assert [life.kept_step for life in found.lives] == [0, 9]
    assert seconds(found, Activity.LOST_WORK) == 9 + 2 * 2


def test_going_back_behind_the_life_before():
    run = FakeRun()
    run.live(8, every=4)
    run.live(3, every=4)  # from 8
    run.saved = 4  # that of step 8 turns out to be damaged
    run.live(6, every=4)
    found = joined_lives(run.records)
    assert [life.kept_step for life in found.lives] == [4, 4, 10]
    assert [life.seconds[Activity.LOST_WORK] for life in found.lives] == [pytest.approx(6), 3, 0]
    assert seconds(found, Activity.STEP) == 10


LIVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans()), min_size=1)


@settings(max_examples=100)
@given(LIVES, st.integers(1, 5))
def test_kinds_add_up_over_any_lives(lives, every):
    run = FakeRun()
    began, ended = run.now, run.now
    for steps, gap, restores in lives:
        run.live(steps, every=every, restores=restores)
        ended = run.now
        run.now += gap
    found = joined_lives(run.records)
    assert found.wall_seconds == pytest.approx(ended - began)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    assert min(found.seconds.values()) >= 0
    # Every step that counts was taken once, and took a second.
    assert found.seconds[Activity.STEP] == pytest.approx(found.lives[-1].last_step)
    assert found.lost_steps == sum(steps for steps, _, _ in lives) - found.lives[-1].last_step
    assert all(life.seconds[kind] >= 0 for life in found.lives for kind in WORK)


def test_records_of_time_stay_where_a_run_goes_back(tmp_path):
    account = Account(Activity.STEP)
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        for step in (0, 4, 7):
            writer.write(step, {"loss": 1.0})
            writer.write(step, account_values(account, 1), split=SPLIT)
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        assert next_life(read_metrics(tmp_path)) == 2
        writer.write(4, account_values(account, 2), split=SPLIT)
    append(tmp_path, 9, account_values(account, 2), split=SPLIT)
    records = read_metrics(tmp_path)
    assert [(r["step"], r["split"]) for r in records] == [
        *((0, "train"), (0, SPLIT), (4, "train"), (4, SPLIT)),
        *((7, SPLIT), (4, SPLIT), (9, SPLIT)),
    ]
    assert [(life.last_step, life.kept_step) for life in joined_lives(records).lives] == [
        (7, 4),
        (9, 9),
    ]


def test_no_records_of_time():
    assert joined_lives([{"step": 1, "split": "train", "time": 1.0, "loss": 2.0}]) is None
