"""A run whose batch size changes: what it sees, what it computes, and where it resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.experiment import Experiment, ExperimentConfig, build
from jaxdist.run.strategies import through_stages
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.contract import Prepared

RAMP = {"start_batch_size": 16, "increment": 16, "ramp_examples": 64}
PHASES = [
    {"examples_fraction": 0.75, "batch_size": 32, "learning_rate": 0.02, "warmup_fraction": 0.25},
    {"examples_fraction": 0.25, "batch_size": 16, "learning_rate": 0.01},
]
full = partial(pytest.param, marks=pytest.mark.full)
RUNS = [
    ({"steps": 9, "batch_ramp": RAMP, "microbatches": 2}, {"learning_rate": 1e-2}),
    ({"steps": 12, "phases": PHASES}, {}),
]


def experiment(train, optim) -> Experiment:
    sections = {
        "model": {"type": "mlp", "hidden": [16]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "lamb", **optim},
        "train": {"batch_size": 64, **train},
        "mesh": {"data": 4, "tensor": 2},
    }
    return build(validate(Document(sections), ExperimentConfig))


class Hooks:
    """Records steps and losses, and stops after `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.losses, self.stop, self.stopped = [], stop, False

    def waiting(self, step):
        pass

    def metrics(self, step, values, step_seconds):
        self.losses.append((step, float(values[0])))

    def due(self, step):
        return step == self.stop

    def boundary(self, step, state):
        self.stopped = True
        return state, True


def go(found: Experiment, state: TrainState, stop: int | None = None):
    hooks, entered = Hooks(stop), []
    given: Any = hooks
    state = through_stages(
        Prepared(state, found.stages, given, entered.append, found.config.optim, Path())
    )
    return state, hooks.losses, entered


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.full
@pytest.mark.parametrize(("train", "optim"), [full(*RUNS[0]), RUNS[1]])
def test_stages_equal_steps_by_hand_over_the_examples_in_order(train, optim):
    found = experiment(train, optim)
    state, losses, entered = go(found, found.program.init())
    by_hand, expected, seen = found.program.init(), [], 0
    in_order = np.concatenate([found.loader.indices(i) for i in range(20)])
    for stage in found.stages:
        assert stage.loader.indices(0)[0] == in_order[seen]
        for _ in range(stage.last_step - stage.first_step):
            rows = in_order[seen : seen + stage.batch_size]
            seen += stage.batch_size
            batch = {k: np.stack([found.dataset.train[int(i)][k] for i in rows]) for k in
                     ("image", "label")}  # fmt: skip
            placed = {k: jax.device_put(v, stage.program.batch[k].sharding)
                      for k, v in batch.items()}  # fmt: skip
            by_hand, values = stage.program.train(by_hand, placed)
            expected.append(float(values[0]))
    assert [step for step, _ in losses] == list(range(1, found.total_steps + 1))
    assert [loss for _, loss in losses] == expected
    assert bits(state) == bits(by_hand)
    assert entered == list(found.stages)


@pytest.mark.full
@pytest.mark.parametrize(("train", "optim"), [RUNS[0], full(*RUNS[1])])
def test_a_stop_anywhere_resumes_bit_for_bit(train, optim):
    found = experiment(train, optim)
    whole, losses, _ = go(found, found.program.init())
    border = found.stages[0].last_step
    for stop in (border - 1, border, border + 1):
        half, first, _ = go(found, found.program.init(), stop)
        assert int(half.step) == stop
        state, second, _ = go(found, half)
        assert first + second == losses
        assert bits(state) == bits(whole)


@pytest.mark.full
def test_each_stage_compiles_once_and_the_last_is_the_plain_program():
    found = experiment(*RUNS[0])
    go(found, found.program.init())
    programs = [stage.program for stage in found.stages]
    assert programs[-1] is found.program
    assert [p.train._cache_size() for p in programs] == [1] * len(programs)  # pyright: ignore[reportAttributeAccessIssue]  (jit's own)


def test_a_run_without_stages_is_one():
    found = experiment({"steps": 3}, {"learning_rate": 1e-2})
    (stage,) = found.stages
    assert (stage.program, stage.loader) == (found.program, found.loader)
    assert (stage.first_step, stage.last_step, stage.batch_size) == (0, 3, 64)


def test_examples_are_counted_across_epochs():
    """No example twice before all were seen once, whatever the batch sizes."""
    found = experiment({"epochs": 2.0, "batch_ramp": RAMP}, {"learning_rate": 1e-2})
    seen = np.concatenate(
        [
            stage.loader.indices(i)
            for stage in found.stages
            for i in range(stage.last_step - stage.first_step)
        ]
    )
    size = len(found.dataset.train)
    assert sorted(seen[:size]) == sorted(seen[size : 2 * size]) == list(range(size))
