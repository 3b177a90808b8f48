"""Which runs a study makes, by a trainer whose answers are known."""

from __future__ import annotations

import math

import pytest
from study_runs import cell, outcome

from jaxdist.errors import ConfigError
from jaxdist.study.definition import contenders
from jaxdist.study.plan import (
    StudyCell,
    StudyPlan,
    parse_batches,
    parse_optimizers,
    run_plan,
    search_rate,
)
from jaxdist.study.trial import Trial, TrialOutcome

# The best learning rate, by batch size: it grows faster than the rule says.
BEST = {32: 0.04, 128: 0.08, 512: 0.64}
PLAN = StudyPlan(
    optimizers=parse_optimizers("lamb,sgd"),
    steps={32: 160, 128: 40, 512: 10},
    seeds=(2, 3, 4),
    tuning_seeds=(0, 1),
    tune=True,
)


class Trainer:
    """Accuracy falls with the distance to the best learning rate; a little differs by seed."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def __call__(self, trial: Trial) -> TrialOutcome:
        self.trials.append(trial)
        away = abs(math.log2(trial.learning_rate / BEST[trial.batch_size]))
        return outcome(trial, 0.9 - 0.1 * away + 0.001 * trial.seed, diverged=away > 4.5)


def studied(plan: StudyPlan = PLAN) -> tuple[dict[tuple[str, int, bool], StudyCell], Trainer]:
    trainer = Trainer()
    found = [c for cells in run_plan(plan, trainer) for c in cells]
    return {(c.optimizer, c.batch_size, c.tuned): c for c in found}, trainer


def test_the_rule_carries_the_best_rate_of_the_base_batch() -> None:
    cells, _ = studied()
    assert [cells["lamb", size, False].learning_rate for size in BEST] == [0.04, 0.08, 0.16]
    # The search for SGD begins at 0.05, in steps of a factor of 2.
    assert [cells["sgd", size, False].learning_rate for size in BEST] == [0.05, 0.1, 0.2]


def test_tuning_finds_what_the_rule_misses_beyond_its_first_grid() -> None:
    cells, _ = studied()
    assert cells["lamb", 512, True].learning_rate == 0.64
    assert cells["lamb", 512, True].mean > cells["lamb", 512, False].mean
    assert cells["lamb", 32, True].outcomes == cells["lamb", 32, False].outcomes


def test_seeds_that_choose_are_not_those_reported() -> None:
    cells, trainer = studied()
    assert {o.trial.seed for c in cells.values() for o in c.outcomes} == {2, 3, 4}
    assert {t.seed for t in trainer.trials} == {0, 1, 2, 3, 4}


def test_warm_up_is_a_fifth_of_the_run_at_the_largest_batch_and_shrinks_with_the_batch() -> None:
    _, trainer = studied()
    warmups = {
        t.batch_size: {x.warmup_steps for x in trainer.trials if x == t} for t in trainer.trials
    }
    assert warmups == {32: {2}, 128: {2}, 512: {2}}  # of 160, 40 and 10 steps


def test_without_tuning_only_the_base_batch_is_searched() -> None:
    plan = StudyPlan(PLAN.optimizers, PLAN.steps, PLAN.seeds, PLAN.tuning_seeds, tune=False)
    cells, trainer = studied(plan)
    assert not any(tuned for *_, tuned in cells)
    assert {t.batch_size for t in trainer.trials if t.seed in PLAN.tuning_seeds} == {32}


def test_a_cell_with_a_diverged_run_has_no_mean() -> None:
    assert cell("sgd", 32, 0.9, 0.8).mean == pytest.approx(0.85)
    assert cell("sgd", 32, 0.9, 0.8).spread == pytest.approx(0.1 / math.sqrt(2))
    broken = cell("sgd", 32, 0.9, None)
    assert broken.diverged == 1
    assert math.isnan(broken.mean)
    assert math.isnan(broken.spread)


def test_search_walks_to_the_best_and_stops() -> None:
    seen: list[float] = []
    best = search_rate(1.0, lambda rate: (-abs((seen.append(rate) or rate) - 1 / 32),))
    assert best == 1 / 32
    assert sorted(seen) == [2.0**i for i in range(-6, 2)]
    seen.clear()
    search_rate(1.0, lambda rate: (seen.append(rate) or rate,))
    assert max(seen) == 2.0 ** (1 + 8)


def test_search_takes_the_smallest_of_equals() -> None:
    assert search_rate(1.0, lambda rate: (float(0.4 < rate < 3),)) == 0.5


def test_every_contender_starts_somewhere() -> None:
    assert set(contenders()) == {"sgd", "nesterov", "lars", "lamb", "adamw"}
    assert parse_optimizers(",".join(contenders())) == contenders()
    assert all(one.start > 0 for one in contenders().values())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "--optimizers is empty; choose from sgd,nesterov"),
        (["lamb", "lamp"], "'lamp': did you mean 'lamb'"),
        (["lamb", "sgd", "lamb"], "--optimizers names lamb 2 times"),
    ],
)
def test_bad_optimizers(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_optimizers(",".join(names))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" , ", "--batches is empty"),
        ("64,x2", "--batches 'x2' is not a batch size: write whole"),
        ("0", "--batches '0' is not a batch size: write whole"),
        ("-4", "--batches '-4' is not a batch size: write whole"),
        ("64,128,64", "--batches names 64 2 times"),
    ],
)
def test_bad_batches(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_batches(text)
    assert message in str(caught.value)
