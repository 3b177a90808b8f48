import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.optim.build import AdamWConfig, plan_rate
from jaxdist.optim.schedules import ScheduleConfig, build_schedule


def rates(steps, **settings):
    schedule = build_schedule(ScheduleConfig(**settings), peak=2.0, total_steps=steps)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


def test_warmup_reaches_the_peak_and_never_starts_at_zero():
    found = rates(10, type="constant", warmup_steps=4)
    np.testing.assert_allclose(found, [0.5, 1, 1.5, 2, 2, 2, 2, 2, 2, 2, 2])


def test_cosine_is_half_way_at_the_middle_and_ends_at_its_fraction():
    found = rates(8, type="cosine", end_fraction=0.1)
    np.testing.assert_allclose(found[[0, 4, 8]], [2, 1.1, 0.2], rtol=1e-6)


def test_poly_is_linear_to_a_power():
    np.testing.assert_allclose(rates(4, type="poly", power=2.0), [2, 1.125, 0.5, 0.125, 0])
    np.testing.assert_allclose(rates(4, type="poly"), rates(4, type="linear"))


@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
def test_any_warmup_keeps_between_zero_and_the_peak(warmup):
    found = rates(10, type="linear", warmup_steps=warmup)
    assert (found >= 0).all()
    assert found.max() == 2


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "poly"])
def test_a_run_shorter_than_its_warmup_has_the_first_rates_of_a_longer_one(kind):
    short, long = rates(10, type=kind, warmup_steps=15), rates(40, type=kind, warmup_steps=15)
    np.testing.assert_array_equal(short[:10], long[:10])


def test_a_run_shorter_than_its_warmup_says_so():
    config = AdamWConfig(type="adamw", learning_rate=1.0, schedule=ScheduleConfig(warmup_steps=60))
    assert plan_rate(config, total_steps=60).explained == ()
    [line] = plan_rate(config, total_steps=40).explained
    assert line == (
        "the run ends in its warm-up of 60 steps, at step 40 and 67% of the learning rate; set "
        "optim.schedule.warmup_steps to a smaller number"
    )


@pytest.mark.parametrize(
    "settings", [{"type": "constant", "end_fraction": 0.5}, {"type": "cosine", "power": 2.0}]
)
def test_settings_without_effect_are_refused(settings):
    with pytest.raises(ValidationError, match="no effect"):
        ScheduleConfig(**settings)
