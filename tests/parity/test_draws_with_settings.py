"""Draws with settings beside the plan: the schema takes them, and they equal one device."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig
from jaxdist.parity.draw.draw import draw_with_settings, seeds_of, single_device
from jaxdist.parity.draw.model import MODELS, name_of
from jaxdist.parity.draw.run import judge
from jaxdist.parity.draw.settings import SETTINGS

DRAWN = [draw_with_settings(seed) for seed in seeds_of(300, 0)]


def test_every_draw_is_plain_data_that_the_schema_takes():
    for drawn in DRAWN:
        for config in (drawn.sections, drawn.reader, single_device(drawn.sections)):
            assert json.loads(json.dumps(config)) == config
            validate(Document(config), ExperimentConfig)


def test_every_setting_and_every_model_is_drawn():
    shown = defaultdict(set)
    for drawn in DRAWN:
        shown["model"].add(name_of(drawn.sections["model"]))
        for config in (drawn.sections, drawn.reader):
            for name, setting in SETTINGS.items():
                shown[name].add(setting.shown(config))
    assert shown["model"] == {*MODELS}
    for name in SETTINGS:
        assert len(shown[name]) > 1, f"no draw has the setting {name}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds_of(500, 0))
def test_a_draw_equals_one_device(seed, devices):
    found = judge(seed, draw_with_settings)
    assert found.good, (found.verdict, found.reason, found.differences, found.limit)
