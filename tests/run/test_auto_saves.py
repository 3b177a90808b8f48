"""A run that chooses how often it saves: when, and nothing else."""

from __future__ import annotations

import pytest
from runs import Jaxdist, checkpoint, metrics, steps

TRAIN = {"steps": 60, "batch_size": 64, "log_every": 1}


@pytest.mark.slow
def test_only_when_it_saves_depends_on_it(jaxdist: Jaxdist):
    jaxdist.config(train=TRAIN, eval={"every": None}, checkpoint={"every": 60})
    assert jaxdist.here("train", "config.yaml", "run.directory=fixed").code == 0
    done = jaxdist.here("train", "config.yaml", "checkpoint.every=auto", "run.directory=auto")
    assert done.code == 0, done
    a, b = jaxdist.folder / "fixed", jaxdist.folder / "auto"
    found, wanted = checkpoint(b, 60), checkpoint(a, 60)
    assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in wanted.items()}
    losses = [[r["loss"] for r in metrics(run) if r["split"] == "train"] for run in (a, b)]
    assert losses[0] == losses[1]
    # Once soon, to know what it costs; a day without a failure asks for no more of so short a run.
    assert steps(b) == [10, 60]
    (line,) = [line for line in done.out.splitlines() if line.startswith("saves")]
    assert "a checkpoint every" in line
    (record,) = [r for r in metrics(b) if r["split"] == "intervals"]
    assert record["step"] == 10
    assert record["checkpoint_blocked_mttf_seconds"] == 86_400
    assert 0.9 < record["checkpoint_blocked_predicted"] < 1
    told = jaxdist.here("report", b)
    for out in (done.out, told.out):
        (line,) = [line for line in out.splitlines() if line.startswith("kept")]
        assert "of the time after the first start; the prediction was 9" in line


@pytest.mark.slow
def test_a_run_that_fails_often_saves_often(jaxdist: Jaxdist):
    jaxdist.config(train=TRAIN, eval={"every": None})
    auto = ("checkpoint.every=auto", "checkpoint.mttf_hours=1.0e-9", "checkpoint.keep=100")
    done = jaxdist.here("train", "config.yaml", *auto)
    assert done.code == 0, done
    assert steps(jaxdist.run) == [*range(10, 61)]


@pytest.mark.parametrize("value", ["often", "0", "true"])
def test_what_is_no_interval(jaxdist: Jaxdist, value: str):
    jaxdist.config(train=TRAIN)
    done = jaxdist.here("train", "config.yaml", f"checkpoint.every={value}")
    assert done.code == 2
    assert "checkpoint.every" in done.message
