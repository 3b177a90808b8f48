"""`jaxdist adopt`: from a config.json, without weights, to a config that begins with them."""

import json

import pytest
from rich.console import Console

from benchmarks.models.drawn import CONFIGS
from jaxdist.errors import JaxdistError
from jaxdist.experiment import load
from jaxdist.planner.adopt import adopt

QUIET = Console(quiet=True)


def test_the_best_plan_of_a_config_json_is_written(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    out = tmp_path / "made" / "job.yaml"
    found = adopt(tmp_path, "v5e:2x2", out, ["train.steps=7"], compiled=False, console=QUIET)
    _, config = load(out)
    assert (config.train.steps, config.train.batch_size) == (7, 16)
    assert config.checkpoint.begin_with.run == str(tmp_path)
    assert config.model.qk_norm
    assert config.data.window == 1024
    assert len(found["plans"]) == 3
    assert found["plans"][0]["seconds"] <= found["plans"][1]["seconds"]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(JaxdistError, match=r"is not a model: it has no config.json"):
        adopt(tmp_path, "v5e:2x2", tmp_path / "job.yaml", compiled=False, console=QUIET)
