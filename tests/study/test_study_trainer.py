"""A trial is the run that `jaxdist train` would make, at any learning rate by one program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from chosen import quick

from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import build, load
from jaxdist.study.definition import contenders
from jaxdist.study.trainer import Trainer, at_rate, train_trial
from jaxdist.study.trial import Trial
from jaxdist.train.evaluate import evaluate

RATES = {"sgd": 0.2, "nesterov": 0.1, "lars": 2.0, "lamb": 0.02, "adamw": 0.01}


def plainly(path: Path, trial: Trial) -> dict[str, float]:
    """The held-out means of a run whose config has the trial's learning rate."""
    section = {
        **contenders()[trial.optimizer].section,
        "learning_rate": trial.learning_rate,
        "schedule": {"type": "linear", "warmup_steps": trial.warmup_steps},
    }
    settings = [f"optim={json.dumps(section)}", f"train.batch_size={trial.batch_size}"]
    document, config = load(path, [*settings, f"seed={trial.seed}"])
    experiment = build(config, document)
    state = experiment.program.init()
    with experiment.loader.batches() as batches:
        for _ in range(experiment.total_steps):
            state, _ = experiment.program.train(state, next(batches))
    assert experiment.heldout is not None
    with experiment.heldout.evaluation_batches() as batches:
        return evaluate(experiment.program, state.params, state.buffers, batches)


@pytest.mark.parametrize("name", quick("sgd", "lamb", of=contenders(), slow=True))
@pytest.mark.every(2)
def test_a_trial_is_the_plain_run(config: Path, name: str) -> None:
    trial = Trial(name, 64, 5, RATES[name], 4)
    done = Trainer(config, [])(trial)
    expected = plainly(config, trial)
    assert done.steps == 22
    assert not done.diverged
    assert expected["accuracy"] > 0.25, "it learns, so the learning rate matters"
    assert done.metrics == pytest.approx(expected, rel=2e-4)


@pytest.mark.full
def test_one_program_serves_every_learning_rate(config: Path) -> None:
    trainer = Trainer(config, [])
    first = Trial("adamw", 64, 0, 0.01, 2)
    runs = [trainer(replace(first, learning_rate=rate)) for rate in (0.01, 0.001, 0.01)]
    assert runs[0].metrics == runs[2].metrics, "no run uses up what the next one begins with"
    assert runs[0].metrics != runs[1].metrics
    built, _ = trainer._built(replace(first, learning_rate=1.0))
    assert built.program.train._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]


def test_the_rate_in_the_state_moves_no_buffer(config: Path) -> None:
    _, start = Trainer(config, [])._built(Trial("lamb", 64, 0, 1.0, 0))
    changed = at_rate(start, 0.25)
    pairs = zip(jax.tree_util.tree_leaves_with_path(start), jax.tree.leaves(changed), strict=True)
    different = []
    for (path, old), new in pairs:
        assert (old.shape, old.dtype, old.sharding) == (new.shape, new.dtype, new.sharding)
        if jax.device_get(old).tobytes() != jax.device_get(new).tobytes():
            different.append((jax.tree_util.keystr(path), float(new)))
    assert [value for _, value in different] == [0.25]
    assert "step_size" in different[0][0]


def test_a_run_that_diverges_is_told_and_cut_short(config: Path) -> None:
    trainer = Trainer(config, [])
    done = trainer(Trial("sgd", 64, 0, 1e20, 0))
    assert done.diverged
    assert not np.isfinite(done.metrics["loss"])
    experiment, start = trainer._built(Trial("sgd", 64, 0, 1.0, 0))
    state, diverged = train_trial(experiment, at_rate(start, 1e20))
    assert diverged
    assert int(state.step) < 22


def test_identity_is_of_all_that_matters_and_nothing_else(config: Path) -> None:
    trial = Trial("sgd", 64, 0, 0.1, 0)
    trainer = Trainer(config, [])
    same = Trainer(config, ["run.directory=elsewhere", "eval.every=7"])
    assert trainer.identity(trial) == same.identity(trial)
    others = [
        replace(trial, optimizer="nesterov"),
        replace(trial, batch_size=128),
        replace(trial, seed=1),
        replace(trial, learning_rate=0.2),
        replace(trial, warmup_steps=1),
    ]
    names = {trainer.identity(trial), *(trainer.identity(other) for other in others)}
    names.add(Trainer(config, ["train.epochs=2"]).identity(trial))
    names.add(Trainer(config, ["model.hidden=[8]"]).identity(trial))
    assert len(names) == 8


def test_what_cannot_be_trained_is_refused_before_the_first_run(config: Path) -> None:
    trials = [Trial("sgd", size, 0, 1.0, 0) for size in (64, 1440)]
    assert [e.total_steps for e in Trainer(config, []).check(trials[:1])] == [22]
    with pytest.raises(ConfigError, match=r"--batches 1440 is larger .* of 1,438 examples"):
        Trainer(config, []).check(trials)
    with pytest.raises(ConfigError, match="a batch of 60 does not divide over 8 devices"):
        Trainer(config, []).check([Trial("sgd", 60, 0, 1.0, 0)])


def test_a_batch_that_changes_within_a_run_is_refused(config: Path) -> None:
    ramp = "{start_batch_size: 32, increment: 32, ramp_examples: 512}"
    trainer = Trainer(config, [f"train.batch_ramp={ramp}"])
    with pytest.raises(ConfigError, match=r"tiny\.yaml: its runs change the batch size \(32, 64"):
        trainer.check([Trial("sgd", 64, 0, 1.0, 0)])


def test_a_run_that_does_more_than_steps_is_refused(config: Path) -> None:
    trainer = Trainer(config, ["strategy={type: lookahead}"])
    with pytest.raises(ConfigError, match=r"tiny\.yaml: strategy\.type lookahead changes par"):
        trainer.check([Trial("sgd", 64, 0, 1.0, 0)])


def test_data_without_a_held_out_split_is_refused(config: Path) -> None:
    folder = config.parent / "idx"
    folder.mkdir()
    image = bytes([0, 0, 8, 3, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(32)
    (folder / "train-images").write_bytes(image)
    (folder / "train-labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 8, *range(8)]))
    trainer = Trainer(config, ["data={type: images, source: idx, directory: idx}"])
    with pytest.raises(DataError, match=r"tiny\.yaml has no held-out split"):
        trainer.check([Trial("sgd", 8, 0, 1.0, 0)])
