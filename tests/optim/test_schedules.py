import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.errors import ConfigError
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


def test_a_warmup_longer_than_the_run():
    with pytest.raises(ConfigError, match="warmup_steps 11 exceed the run's 10 steps"):
        rates(10, type="linear", warmup_steps=11)


@pytest.mark.parametrize(
    "settings", [{"type": "constant", "end_fraction": 0.5}, {"type": "cosine", "power": 2.0}]
)
def test_settings_without_effect_are_refused(settings):
    with pytest.raises(ValidationError, match="no effect"):
        ScheduleConfig(**settings)
