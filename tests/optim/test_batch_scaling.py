import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.optim.batch_scaling import (
    BatchPhase,
    BatchRampConfig,
    PhaseConfig,
    ScaleFromConfig,
    plan_phases,
    ramp_stages,
    scale,
)

BERT_EXAMPLES = 512 * 1_000_000
# Batch, steps, learning rate, warm-up ratio of LAMB on BERT, untuned: arXiv 1904.00962.
BERT_TABLE = [
    (512, 1_000_000, 5 / (2**3.0 * 1e3), 1 / 320),
    (1024, 500_000, 5 / (2**2.5 * 1e3), 1 / 160),
    (2048, 250_000, 5 / (2**2.0 * 1e3), 1 / 80),
    (4096, 125_000, 5 / (2**1.5 * 1e3), 1 / 40),
    (8192, 62_500, 5 / (2**1.0 * 1e3), 1 / 20),
    (16384, 31_250, 5 / (2**0.5 * 1e3), 1 / 10),
    (32768, 15_625, 5e-3, 1 / 5),
]
# Batch, learning rate, warm-up epochs (of 90) of LAMB on ResNet-50: the same paper.
RESNET_TABLE = [(512 * 2**k, 4 / (2 ** (3 - k / 2) * 100), 0.3125 * 2**k) for k in range(7)]


@pytest.mark.parametrize(("batch_size", "steps", "rate", "ratio"), BERT_TABLE)
def test_the_bert_table_follows_from_its_first_row(batch_size, steps, rate, ratio):
    first = ScaleFromConfig(batch_size=512, learning_rate=BERT_TABLE[0][2], warmup_fraction=1 / 320)
    found = scale(first, batch_size=batch_size, total_steps=steps)
    assert steps == BERT_EXAMPLES // batch_size
    assert found.learning_rate.value == pytest.approx(rate, rel=1e-12)
    assert found.warmup_steps.value == 3125 == pytest.approx(ratio * steps)


@pytest.mark.parametrize(("batch_size", "rate", "epochs"), RESNET_TABLE)
def test_the_resnet_table_follows_from_its_first_row(batch_size, rate, epochs):
    first = ScaleFromConfig(
        batch_size=512, learning_rate=RESNET_TABLE[0][1], warmup_epochs=RESNET_TABLE[0][2]
    )
    images, steps = 1_281_167, round(90 * 1_281_167 / batch_size)
    found = scale(first, batch_size=batch_size, total_steps=steps, examples_per_epoch=images)
    assert found.learning_rate.value == pytest.approx(rate, rel=1e-12)
    assert found.warmup_steps.value * batch_size / images == pytest.approx(epochs, rel=5e-3)


@pytest.mark.parametrize(
    ("rule", "rate", "warmup"), [("linear", 0.8, 50), ("sqrt", 0.2, 50), ("lamb", 0.2, 800)]
)
def test_the_rules_at_sixteen_times_the_batch(rule, rate, warmup):
    config = ScaleFromConfig(batch_size=64, learning_rate=0.05, rule=rule, warmup_epochs=0.5)
    found = scale(config, batch_size=1024, total_steps=1000, examples_per_epoch=102_400)
    assert found.learning_rate.value == pytest.approx(rate)
    assert found.warmup_steps.value == warmup


def test_goyal_linear_rule():
    config = ScaleFromConfig(batch_size=256, learning_rate=0.1, rule="linear", warmup_epochs=5.0)
    found = scale(config, batch_size=8192, total_steps=14_076, examples_per_epoch=1_281_167)
    assert found.learning_rate.value == pytest.approx(3.2)
    assert found.warmup_steps.value == 782


def test_each_value_says_how_it_came_about():
    config = ScaleFromConfig(batch_size=64, learning_rate=0.05, rule="lamb", warmup_epochs=0.5)
    found = scale(config, batch_size=256, total_steps=1000, examples_per_epoch=25_600)
    assert found.learning_rate.why == "0.1 = 0.05 x sqrt(256 / 64), rule lamb"
    assert found.warmup_steps.why == (
        "200 of 1000 steps (20%) = 0.5 of 10 epochs at batch 64 x 256 / 64, rule lamb"
    )
    plain = ScaleFromConfig(batch_size=64, learning_rate=0.05, rule="linear")
    found = scale(plain, batch_size=32, total_steps=10)
    assert found.learning_rate.why == "0.025 = 0.05 x 32 / 64, rule linear"
    assert found.warmup_steps.why == "0 of 10 steps (0%) = no warm-up given, rule linear"


@pytest.mark.parametrize("rule", ["linear", "sqrt", "lamb"])
def test_the_same_batch_changes_nothing(rule):
    config = ScaleFromConfig(batch_size=96, learning_rate=0.3, rule=rule, warmup_fraction=0.25)
    found = scale(config, batch_size=96, total_steps=400)
    assert (found.learning_rate.value, found.warmup_steps.value) == (0.3, 100)


def test_a_warmup_that_fills_the_run():
    config = ScaleFromConfig(batch_size=512, learning_rate=1e-3, warmup_fraction=1 / 320)
    with pytest.raises(
        ConfigError, match=r"would fill the whole run: 3125 of 3125 .* a smaller batch than 163840"
    ):
        scale(config, batch_size=163_840, total_steps=3125)


def test_epochs_need_an_epoch():
    config = ScaleFromConfig(batch_size=8, learning_rate=1e-3, warmup_epochs=2.0)
    with pytest.raises(ConfigError, match=r"warmup_epochs 2.0 .* set warmup_fraction instead"):
        scale(config, batch_size=8, total_steps=100)


@pytest.mark.parametrize("name", ["batch_size", "total_steps", "examples_per_epoch"])
def test_sizes_under_one(name):
    config = ScaleFromConfig(batch_size=8, learning_rate=1e-3, warmup_epochs=2.0)
    given = {"batch_size": 8, "total_steps": 100, "examples_per_epoch": 80} | {name: 0}
    with pytest.raises(ConfigError, match=f"scale_from: {name} 0 must be at least 1"):
        scale(config, **given)


def test_the_config_refuses_two_warmups():
    with pytest.raises(ValidationError, match=r"at most one .*\(2.0\).*\(0.1\)"):
        ScaleFromConfig(batch_size=1, learning_rate=1.0, warmup_epochs=2.0, warmup_fraction=0.1)


def test_the_config_is_read_from_yaml_values():
    found = validate(
        Document({"batch_size": 512, "learning_rate": 1, "rule": "sqrt"}), ScaleFromConfig
    )
    assert found == ScaleFromConfig(batch_size=512, learning_rate=1.0, rule="sqrt")


def ramp(start, increment, examples, batch_size, total):
    config = BatchRampConfig(start_batch_size=start, increment=increment, ramp_examples=examples)
    return ramp_stages(config, batch_size=batch_size, total_examples=total)


def megatron(start, increment, examples, batch_size, total):
    """The batch size of each step, by a walk over the examples seen."""
    count, seen, sizes = (batch_size - start) // increment, 0, []
    while seen < total:
        passed = sum(examples * (i + 1) // count <= seen for i in range(count))
        sizes.append(start + passed * increment)
        seen += sizes[-1]
    return sizes


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 20),
    count=st.integers(1, 8),
    examples=st.integers(1, 500),
    rest=st.integers(1, 500),
)
def test_a_ramp_is_the_walk_over_its_examples(start, increment, count, examples, rest):
    given = (start, increment, examples, start + count * increment, examples + rest)
    stages = ramp(*given)
    sizes = [size for stage in stages for size in [stage.batch_size] * stage.steps]
    assert sizes == megatron(*given)
    assert [stage.first_step for stage in stages] == [
        sum(before.steps for before in stages[:index]) for index in range(len(stages))
    ]
    assert all(stage.steps > 0 for stage in stages)


@pytest.mark.parametrize(("start", "increment"), [(4, 5), (16, 4), (20, 4)])
def test_a_ramp_that_misses_its_end(start, increment):
    with pytest.raises(
        ConfigError, match=f"from {start} to 16 is not .* multiple of increment {increment}"
    ):
        ramp(start, increment, 10, 16, 100)


def test_a_ramp_longer_than_the_run():
    with pytest.raises(ConfigError, match="ramp_examples 100 exceed the run's 100 examples"):
        ramp(4, 4, 100, 16, 100)


FIRST = PhaseConfig(
    examples_fraction=0.9, batch_size=65536, learning_rate=7e-3, warmup_fraction=0.25
)
SECOND = PhaseConfig(
    examples_fraction=0.1, batch_size=32768, learning_rate=5e-3, warmup_fraction=0.125
)


def test_the_mixed_batch_recipe_has_its_steps():
    plan = plan_phases([FIRST, SECOND], total_examples=BERT_EXAMPLES)
    assert plan.stages == (BatchPhase(0, 7031, 65536), BatchPhase(7031, 1562, 32768))
    # The paper ran 8599 iterations.
    assert sum(stage.steps for stage in plan.stages) == pytest.approx(8599, rel=1e-3)


def test_the_second_phase_warms_up_again_from_zero():
    plan = plan_phases([FIRST, SECOND], total_examples=BERT_EXAMPLES)
    rates = np.array([float(plan.schedule(step)) for step in range(0, 8593, 71)])
    second = 7031
    at = [float(plan.schedule(second + step)) for step in (-1, 0, 194, 195, 1561)]
    assert at[0] < 1e-5
    assert at[1] == pytest.approx(5e-3 / 195, rel=1e-4)
    assert at[2:4] == pytest.approx([5e-3, 5e-3], rel=1e-4)
    assert at[4] == pytest.approx(5e-3 / 1367, rel=1e-2)
    assert max(rates) == pytest.approx(7e-3, rel=1e-2)
    assert math.isclose(float(plan.schedule(1757)), 7e-3, rel_tol=1e-5)


def test_phases_are_explained():
    small = PhaseConfig(
        examples_fraction=0.5,
        batch_size=8,
        learning_rate=0.1,
        end_fraction=0.5,
        warmup_fraction=0.2,
    )
    plan = plan_phases([small, small], total_examples=160)
    assert plan.explained == (
        "steps 1 to 10: batch 8, learning rate from 0 to 0.1 in 2 steps, then to 0.05",
        "steps 11 to 20: batch 8, learning rate from 0 to 0.1 in 2 steps, then to 0.05",
    )


@pytest.mark.parametrize(("phases", "total"), [([], 0), ([FIRST], 0.9), ([FIRST, FIRST], 1.8)])
def test_fractions_that_are_not_a_whole(phases, total):
    with pytest.raises(ConfigError, match=f"sum to {total}, not to 1"):
        plan_phases(phases, total_examples=1000)


def test_a_phase_without_a_step():
    with pytest.raises(ConfigError, match=r"phase 2 has 0.1 of 100000 examples, less than one"):
        plan_phases([FIRST.model_copy(update={"batch_size": 8}), SECOND], total_examples=100_000)
