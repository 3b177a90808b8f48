"""From config to stages and learning rate, and what is refused on the way."""

from __future__ import annotations

import jax
import pytest

from jaxdist.config import Document, validate
from jaxdist.data.images.dataset import ImagesConfig
from jaxdist.errors import ConfigError, DataError
from jaxdist.experiment import ExperimentConfig, build, explain_config
from jaxdist.optim.batch_scaling import BatchPhase
from jaxdist.train.plan import TrainConfig, explain_plan, plan_learning_rate, plan_stages

RAMP = {"start_batch_size": 16, "increment": 16, "ramp_examples": 160}
PHASES = [
    {"examples_fraction": 0.75, "batch_size": 32, "learning_rate": 0.02, "warmup_fraction": 0.25},
    {"examples_fraction": 0.25, "batch_size": 16, "learning_rate": 0.01},
]
SCALE = {"batch_size": 16, "learning_rate": 0.01, "warmup_fraction": 0.125}


def config(optim=None, *, data=None, mesh=None, **train):
    sections = {
        "model": {"type": "mlp", "hidden": [8]},
        "data": data or {"type": "images", "source": "digits"},
        "optim": {"type": "sgd", **({"learning_rate": 0.1} if optim is None else optim)},
        "train": {"batch_size": 64, **train},
        "mesh": mesh or {},
    }
    return validate(Document(sections), ExperimentConfig)


def stages(**train):
    return plan_stages(validate(Document({"batch_size": 64, **train}), TrainConfig), 1000).stages


def test_one_stage_without_more_ado():
    assert stages(steps=7) == (BatchPhase(0, 7, 64),)
    assert stages(epochs=2.0) == (BatchPhase(0, 31, 64),)
    assert stages(epochs=1e-3) == (BatchPhase(0, 1, 64),)


def test_half_a_step_of_an_epoch_is_a_step():
    """A batch of 64 on 1,000 examples: 0.16 epochs are 2.5 steps."""
    assert stages(epochs=0.16) == (BatchPhase(0, 3, 64),)


def test_a_ramp_of_so_many_steps_or_epochs():
    rising = (BatchPhase(0, 4, 16), BatchPhase(4, 2, 32), BatchPhase(6, 1, 48))
    assert stages(steps=20, batch_ramp=RAMP) == (*rising, BatchPhase(7, 13, 64))
    # 2000 examples, of which the ramp takes 4 x 16 + 2 x 32 + 48 = 176.
    assert stages(epochs=2.0, batch_ramp=RAMP) == (*rising, BatchPhase(7, 29, 64))


def test_phases_of_so_many_steps_or_epochs():
    assert stages(steps=20, phases=PHASES) == (BatchPhase(0, 12, 32), BatchPhase(12, 8, 16))
    assert stages(epochs=0.64, phases=PHASES) == (BatchPhase(0, 15, 32), BatchPhase(15, 10, 16))


def test_what_was_derived_is_explained():
    assert explain_config(config({"scale_from": SCALE}, steps=40)) == (
        "learning rate 0.02 = 0.01 x sqrt(64 / 16), rule lamb",
        "warm-up 20 of 40 steps (50%) = 12.5% of the run at batch 16 x 64 / 16, rule lamb",
    )
    assert explain_config(config(steps=20, batch_ramp=RAMP)) == (
        "steps 1 to 4: batch 16",
        "steps 5 to 6: batch 32",
        "steps 7 to 7: batch 48",
        "steps 8 to 20: batch 64",
    )
    assert explain_config(config({}, steps=20, phases=PHASES))[1] == (
        "steps 13 to 20: batch 16, learning rate from 0 to 0.01 in 0 steps, then to 0"
    )
    assert explain_config(config(steps=20)) == explain_config(config(epochs=2.0)) == ()


def test_the_size_of_the_data_is_read_only_where_it_counts_and_is_at_hand():
    # 1,438 digits: 45 steps of 64 are two epochs.
    assert explain_config(config({"scale_from": SCALE}, epochs=2.0))[1].startswith("22 of 45", 8)
    fashion = config(
        {"scale_from": SCALE}, epochs=2.0, data={"type": "images", "source": "fashion-mnist"}
    )
    assert explain_config(fashion) == (
        "learning rate, warm-up and stages are unknown before the data is read",
    )


def test_data_that_cannot_be_read_leaves_the_derived_values_open(monkeypatch):
    def nothing(self):
        raise DataError("data: no scikit-learn")

    monkeypatch.setattr(ImagesConfig, "build", nothing)
    unread = config({"scale_from": SCALE}, epochs=2.0)
    assert explain_config(unread) == (
        "learning rate, warm-up and stages are unknown before the data is read",
    )


def test_the_run_and_its_explanation_agree():
    found = build(config({"scale_from": SCALE}, epochs=2.0, batch_ramp=RAMP))
    assert found.explained == explain_config(found.config)
    assert found.total_steps == found.stages[-1].last_step
    assert [s.batch_size for s in found.stages] == [16, 32, 48, 64]
    schedule = found.program.optimizer.schedule
    assert max(float(schedule(step)) for step in range(found.total_steps)) == pytest.approx(0.02)


def test_a_schedule_may_bring_the_warmup_of_a_scaled_rate():
    schedule = {"type": "constant", "warmup_steps": 4}
    scaled = {"batch_size": 16, "learning_rate": 0.01}
    found = config({"scale_from": scaled, "schedule": schedule}, steps=8)
    plan = plan_stages(found.train, None)
    rate = plan_learning_rate(found.train, found.optim, plan, None)
    assert [round(float(rate.schedule(s)), 4) for s in range(5)] == [0.005, 0.01, 0.015, 0.02, 0.02]
    assert explain_plan(plan, rate) == ("learning rate 0.02 = 0.01 x sqrt(64 / 16), rule lamb",)


def test_stages_of_one_size_share_a_program_and_microbatches_stay_small():
    phases = [{**PHASES[0], "batch_size": 128}, {**PHASES[1], "batch_size": 48}]
    found = build(config({}, steps=20, phases=phases, microbatches=2))
    assert [s.program.compute.microbatches for s in found.stages] == [4, 2]
    assert [s.program.batch["image"].shape[0] for s in found.stages] == [128, 48]
    halves = [{**p, "batch_size": 64, "examples_fraction": 0.5} for p in PHASES]
    found = build(config({}, steps=20, phases=halves))
    assert [s.program for s in found.stages] == [found.program] * 2


REFUSED = [
    ({"learning_rate": 0.1, "scale_from": SCALE}, {"steps": 9},
     r"optim .*set only one of learning_rate \(0.1\) and scale_from \(learning_rate 0.01 at batch"),
    ({}, {"steps": 9}, "optim .*set exactly one of learning_rate and scale_from"),
    ({"scale_from": SCALE, "schedule": {"warmup_steps": 5}}, {"steps": 9},
     r"warmup_steps 5 and optim.scale_from.warmup_fraction 0.125; leave either out"),
    ({"learning_rate": 0.1, "max_skipped": 4}, {"steps": 9}, "max_skipped 4 has no effect"),
    (None, {"steps": 9, "batch_ramp": RAMP, "phases": PHASES},
     "train .*at most one of batch_ramp and phases"),
    (None, {"steps": 9, "epochs": 2.0}, "set exactly one of steps and epochs"),
    (None, {"steps": 9, "phases": PHASES}, "learning_rate has no effect, since train.phases"),
    ({"schedule": {"type": "linear"}}, {"steps": 9, "phases": PHASES}, "schedule has no effect"),
    ({"scale_from": SCALE}, {"steps": 9, "phases": PHASES}, "scale_from has no effect"),
    (None, {"steps": 7, "batch_ramp": RAMP},
     "7 steps pass until ramp_examples 160 are seen, but the run has 7"),
    (None, {"steps": 9, "batch_ramp": {**RAMP, "increment": 20}}, "from 16 to 64 is not a"),
    ({"scale_from": {"batch_size": 16, "learning_rate": 0.01, "warmup_epochs": 3}},
     {"steps": 9, "batch_ramp": RAMP}, "warmup_epochs 3 is not a fixed number of steps"),
    ({"scale_from": {**SCALE, "warmup_fraction": 0.5}}, {"steps": 9}, "optim.*fill the whole run"),
]  # fmt: skip


@pytest.mark.parametrize(("optim", "train", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_with_its_values(optim, train, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build(config(optim, **train))


@pytest.mark.parametrize(("microbatches", "size", "parts"), [(1, 12, 8), (4, 24, 16)])
def test_a_stage_that_does_not_divide_is_refused(microbatches, size, parts):
    ramp = {"start_batch_size": size, "increment": 64 - size, "ramp_examples": 100}
    with pytest.raises(ConfigError, match=rf"batch of {size} does not divide .* = {parts} parts"):
        build(config(steps=20, batch_ramp=ramp, microbatches=microbatches, mesh={"data": 8}))


@pytest.mark.parametrize("loss_scale", [{"min_scale": 2.0, "init_scale": 1.0}])
def test_a_loss_scale_that_cannot_work(loss_scale):
    optim = {"learning_rate": 0.1, "loss_scale": {"type": "dynamic", **loss_scale}}
    with pytest.raises(ConfigError, match=r"(?s)optim.*does not hold for 2.0, 1.0, 16777216"):
        build(config(optim, steps=9))


def test_the_plan_needs_no_device():
    assert len(jax.devices()) == 8
    explain_config(config(steps=20, batch_ramp=RAMP, mesh={"data": 4096}))


def test_what_is_wrong_with_a_config_from_python_is_not_said_of_a_file():
    sections = {
        "model": {"type": "mlp", "hidden": [4]},
        "data": {"type": "images", "source": "digits"},
        "optim": {"type": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 1, "batch_size": 63},
        "mesh": {"data": 8},
    }
    with pytest.raises(ConfigError) as caught:
        build(ExperimentConfig.model_validate(sections))
    assert "1 problem in a config from Python:\n  train.batch_size = 63 (a config" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"batch_ramp": {"start_batch_size": 36, "increment": 12, "ramp_examples": 360}},
            [
                "train.batch_ramp, steps 1 to 4: a batch of 36 does not divide over 8 devices",
                "train.batch_ramp, steps 7 to 8: a batch of 60 does not divide over 8 devices",
                "from start_batch_size 36 to train.batch_size 72 by increment 12: each batch size",
            ],
        ),
        (
            {"phases": [PHASES[0], {**PHASES[1], "batch_size": 36}]},
            ["train.phases.1, steps 13 to 16: a batch of 36 does not divide over 8 devices"],
        ),
    ],
)
def test_a_stage_whose_batch_does_not_divide_is_named(settings, lines):
    optim = {} if "phases" in settings else None
    with pytest.raises(ConfigError) as refused:
        build(config(optim, mesh={"data": 8}, steps=16, **{"batch_size": 72, **settings}))
    assert f"train.{next(iter(settings))} = " in str(refused.value)
    found = str(refused.value).splitlines()[1:]
    assert len(found) == len(lines)
    for line, words in zip(found, lines, strict=True):
        assert words in line
