"""Fine-tuning: a run that begins with a part of another's state, and one that saves a part."""

from __future__ import annotations

import numpy as np
import pytest
from runs import Jaxdist, checkpoint

PARAMS = '{"run": "runs/config", "parts": ["params"]}'
SHORT = ("train.steps=1", "eval.every=null", "checkpoint.every=1", "--devices", 8)


@pytest.mark.full
def test_a_run_begins_with_the_parameters_of_another(trained: Jaxdist) -> None:
    given = (f"checkpoint.begin_with={PARAMS}", "optim.learning_rate=1e-30", "run.directory=runs/b")
    done = trained.here("train", "config.yaml", *given, *SHORT)
    assert done.code == 0, done
    assert "begin  with params of step 24 of runs/config" in done.out
    old = checkpoint(trained.run, 24)
    new = checkpoint(trained.folder / "runs/b", 1)
    for name in old:
        if name.startswith("params"):
            np.testing.assert_array_equal(new[name], old[name])
    assert new["step"] == 1


@pytest.mark.full
def test_a_run_that_saves_parameters_is_evaluated_and_not_resumed(trained: Jaxdist) -> None:
    given = ('checkpoint.parts=["params"]', "run.directory=runs/p")
    done = trained.here("train", "config.yaml", *given, *SHORT)
    assert done.code == 0, done
    assert "checkpoints hold only params, so --resume is refused" in " ".join(done.out.split())
    assert all(name.startswith("params/") for name in checkpoint(trained.folder / "runs/p", 1))
    seen = trained.here("eval", "runs/p", "--devices", 8)
    assert (seen.code, "step   1\n" in seen.out) == (0, True), seen
    refused = trained.here("train", "config.yaml", "--resume", *given, *SHORT, "train.steps=2")
    assert refused.code == 3
    assert "contains only a part of the training state" in refused.message


@pytest.mark.full
def test_what_is_refused_before_anything_is_computed(trained: Jaxdist) -> None:
    begin = "checkpoint.begin_with="
    for given, code, complaint in [
        (['checkpoint.parts=["encoder"]'], 2, "checkpoint.parts"),
        (
            [begin + '{"run": "runs/config", "parts": ["!heads"]}'],
            2,
            "!heads: this run's state has no array with such a path; choose from step, params/",
        ),
        ([begin + PARAMS, "model.hidden=[17]"], 3, "expected float32[17,10]"),
        ([begin + '{"run": "runs/x"}'], 3, "runs/x is not a run with checkpoints"),
        ([begin + '{"run": "runs/config", "step": 7}'], 3, "choose from steps [16, 24]"),
        (
            [begin + PARAMS, "strategy.type=parameter_server", "strategy.workers=2"],
            2,
            "checkpoint.begin_with",
        ),
    ]:
        refused = trained.here(
            "train", "config.yaml", *given, "run.directory=runs/c", "--devices", 8
        )
        assert (refused.code, complaint in refused.message) == (code, True), refused
        assert not (trained.folder / "runs/c/config.yaml").exists()
