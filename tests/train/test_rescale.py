"""Batches that follow the mesh: each example once an epoch, and a rate by the rule."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from runs import DIGITS

from jaxdist.config import Document, validate
from jaxdist.data.loader import Loader
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.optim.batch_scaling import RULES, ScaleFromConfig
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.schedules import ScheduleConfig
from jaxdist.train.plan import TrainConfig, plan_learning_rate, plan_stages
from jaxdist.train.rescale import extended, last_stage, seen

EXAMPLES, FULL = 40, 8
CHANGES = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([2, 4, 6, 8, 10])), max_size=6)


def train(size: int, **given: object) -> TrainConfig:
    values = {"epochs": 4.0, "batch_size": size, "rescaled_from": FULL, **given}
    return TrainConfig.model_validate(values)


def indices(size: int, start: int, steps: int) -> list[int]:
    place = SingleDeviceSharding(jax.devices()[0])
    source = [{"x": np.int32(at)} for at in range(EXAMPLES)]
    loader = Loader(source, batch_size=1, sharding=lambda name, shape: place)
    loader = loader.resized(size, start_example=start)
    return [int(one) for step in range(steps) for one in loader.indices(step)]


@settings(max_examples=30)
@given(CHANGES)
def test_each_example_is_used_once_an_epoch_whatever_happened(changes):
    """Steps in one size, then in another; the last generation goes to the run's end."""
    found, step, size, kept = [], 0, FULL, None
    sizes = extended(kept, step, size, FULL)
    for steps, after in [*changes, (None, 0)]:
        plan = plan_stages(train(size), EXAMPLES, sizes)
        (stage,) = plan.stages
        begin = plan.first_examples[0]
        taken = stage.steps - (step - stage.first_step)
        if steps is not None:
            taken = min(steps, taken - 1)
        if taken <= 0:
            break
        offset = step - stage.first_step
        found += indices(size, begin, offset + taken)[offset * size :]
        step, kept = step + taken, [[*one] for one in sizes]
        if steps is None:
            break
        size = after
        sizes = extended(kept, step, size, FULL)
    assert seen(sizes, step) == len(found)
    whole = len(found) // EXAMPLES * EXAMPLES
    for first in range(0, whole, EXAMPLES):
        assert sorted(found[first : first + EXAMPLES]) == list(range(EXAMPLES))
    assert len(set(found[whole:])) == len(found) - whole
    if steps is None:
        assert 4 * EXAMPLES <= len(found) < 4 * EXAMPLES + size


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_rate_is_that_of_as_many_examples_times_the_rule(rule):
    scale = ScaleFromConfig(batch_size=4, learning_rate=0.1, rule=rule, warmup_epochs=0.5)
    optim = LambConfig(type="lamb", scale_from=scale, schedule=ScheduleConfig(type="cosine"))
    whole = plan_learning_rate(
        train(FULL, rescaled_from=None), optim, plan_stages(train(FULL), EXAMPLES), EXAMPLES
    )
    sizes = ((0, 8), (5, 4), (11, 2))  # 40 + 24 examples before the last
    plan = plan_stages(train(2), EXAMPLES, sizes)
    rate = plan_learning_rate(train(2), optim, plan, EXAMPLES)
    factor = (2 / 8) ** RULES[rule][0]
    for step in (11, 12, 30, plan.total_steps):
        wanted = factor * whole.schedule((64 + 2 * (step - 11)) / 8)
        np.testing.assert_allclose(rate.schedule(step), wanted, rtol=1e-5, atol=1e-9)
    assert plan.total_steps == 11 + (160 - 64) / 2
    assert (
        f"x {factor:.6g} since step 11: the batches have 2 examples instead of 8, rule {rule}"
        in rate.explained[-1]
    )


def test_a_run_of_one_size_is_as_without():
    scale = ScaleFromConfig(batch_size=4, learning_rate=0.1)
    optim = LambConfig(type="lamb", scale_from=scale)
    plan = plan_stages(train(FULL, rescaled_from=None), EXAMPLES, ((0, FULL),))
    rate = plan_learning_rate(train(FULL), optim, plan, EXAMPLES)
    assert (plan.total_steps, plan.first_examples) == (20, (0,))
    assert len(rate.explained) == 1
    assert float(rate.schedule(3)) == float(rate.schedule(np.int32(3)))


def test_a_run_is_never_over_before_a_step():
    assert last_stage(((0, 8), (20, 4)), 160).steps == 1


RAMP = {"start_batch_size": 2, "increment": 2, "ramp_examples": 16}


@pytest.mark.parametrize(
    ("given", "scale", "strict", "words"),
    [
        ({}, None, False, "adapt the learning rate to the batch size; set optim.scale_from, or"),
        ({"batch_ramp": RAMP}, 1, False,
         r"rescale with train\.batch_ramp.* leave train\.batch_ramp"),
        ({"phases": [{"batch_size": 8, "examples_fraction": 1.0, "learning_rate": 0.1}]}, 1, False,
         r"rescale with train\.phases.* leave train\.phases"),
        ({}, 1, True, r"rescale with parallel\.deterministic\.type strict: .* the same batch size"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(given, scale, strict, words):
    rule = {"scale_from": {"batch_size": 4, "learning_rate": 0.1}} if scale else {}
    values = {
        **DIGITS,
        "elastic": {"batch": "rescale"},
        "train": {"epochs": 4, "batch_size": FULL, **given},
        "optim": {"type": "adamw", **rule} if scale else {"type": "adamw", "learning_rate": 0.1},
        "parallel": {"deterministic": {"type": "strict", "shards": 8}} if strict else {},
    }
    document = Document(values)
    with pytest.raises(ConfigError, match=words):
        build(validate(document, ExperimentConfig), document, devices=jax.devices()[:1])
