"""What a run leaves behind, and what becomes of it when the same command is given again."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from matplotlib.image import imread
from runs import RUN, Jaxdist, assert_same_run, finish, metrics, steps, wait_for_step

from jaxdist.checkpoint.layout import step_directory
from jaxdist.checkpoint.manifest import read_manifest


def test_everything_is_there(finished: tuple[Path, str]) -> None:
    folder, out = finished
    run = folder / RUN
    assert {path.name for path in run.iterdir()} == {
        *("config.yaml", "versions.json", "metrics.jsonl", "tensorboard", "checkpoints"),
        *("loss.png", "run.json"),
    }
    versions = json.loads((run / "versions.json").read_text())
    assert {"python", "jax", "jaxdist"} <= versions.keys()
    records = metrics(run)
    assert [r["step"] for r in records if r["split"] == "train"] == [*range(1, 25)]
    assert [r["step"] for r in records if r["split"] == "heldout"] == [8, 16, 24]
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert imread(run / "loss.png").std() > 0
    assert f"run    {RUN}" in out
    assert "done   step 24 in" in out
    heldout = records[-1]
    assert f"held-out accuracy {heldout['accuracy']:.4f}" in out


# Which checkpoints stay: tests/checkpoint/test_retention.py.
@pytest.mark.slow
def test_the_last_and_the_best_checkpoints_stay(jaxdist: Jaxdist) -> None:
    # The rate rises without end, so that the loss falls at first and is worst at last.
    jaxdist.config(
        optim={"type": "sgd", "learning_rate": 3.0, "schedule": {"warmup_steps": 64}},
        train={"steps": 64},
        eval={"every": 4, "batches": 1},
        checkpoint={"every": 4, "keep": 2},
    )
    assert jaxdist.here("train", "config.yaml").code == 0
    losses = {r["step"]: r["loss"] for r in metrics(jaxdist.run) if r["split"] == "heldout"}
    best = min(losses, key=losses.__getitem__)
    assert best < 60, "the test needs a run that gets worse"
    assert steps(jaxdist.run) == [best, 60, 64]
    kept = read_manifest(step_directory(jaxdist.run / "checkpoints", best))
    assert f"{kept.metric:.6f}" == f"{losses[best]:.6f}"


@pytest.mark.full
def test_its_config_runs_again_in_a_new_directory(trained: Jaxdist) -> None:
    again = trained.here("train", trained.run / "config.yaml", "run.directory=runs/config")
    assert again.code == 0, again
    assert "run    runs/config-2" in again.out
    assert_same_run(trained.folder / "runs/config-2", trained.run)


def test_a_finished_run_is_left_as_it_is(trained: Jaxdist) -> None:
    shutil.copytree(trained.run, trained.folder / "before")
    again = trained.here("train", "config.yaml", "--resume")
    assert again.code == 0, again
    assert "resume from step 24 of 24" in again.out
    assert_same_run(trained.run, trained.folder / "before")


@pytest.mark.full
def test_a_resume_beside_a_second_run_must_be_told_which(trained: Jaxdist) -> None:
    """The first was deleted and begun again: the highest number is not the newest run."""
    second = trained.folder / "runs/config-2"
    shutil.copytree(trained.run, second)
    (second / "run.json").write_text('{"id": "a2", "begun": "2026-01-01", "asked": "config"}')
    refused = trained.here("train", "config.yaml", "--resume", "train.steps=30")
    assert refused.code == 3, refused
    assert "--resume: 2 runs have begun under the name runs/config" in refused.message
    assert "runs/config-2 (step 24, begun 2026-01-01)" in refused.message
    for chosen, other in ((trained.run, second), (second, trained.run)):
        given = f"run.directory={chosen.relative_to(trained.folder)}"
        longer = trained.here("train", "config.yaml", "--resume", "train.steps=25", given)
        assert longer.code == 0, longer
        assert "resume from step 24 of 25" in longer.out
        assert steps(chosen)[-1] == 25
        assert (steps(other)[-1] == 25) == (chosen == second)


def test_a_longer_run_goes_on(trained: Jaxdist) -> None:
    longer = trained.here("train", "config.yaml", "--resume", "train.steps=30")
    assert longer.code == 0, longer
    assert "changed since this run began: train.steps: 24 -> 30" in longer.out
    assert metrics(trained.run)[-1]["step"] == steps(trained.run)[-1] == 30


@pytest.mark.full
def test_the_same_command_twice_at_once(jaxdist: Jaxdist) -> None:
    """The second runs beside the first, or is refused where it means the very same directory."""
    jaxdist.config(train={"steps": 100_000}, checkpoint={"every": 20, "keep": 10_000})
    first = jaxdist.start("train", "config.yaml")
    while not (jaxdist.run / "run.lock").exists():
        assert first.poll() is None, finish(first)
    resumed = jaxdist.train("--resume")
    assert (resumed.code, resumed.err.count("\n")) == (3, 1), resumed
    assert f"run directory runs/config is in use by process {first.pid} on " in resumed.message
    assert "choose another directory with run.directory=PATH" in resumed.message
    second = jaxdist.train("train.steps=8")
    assert second.code == 0, second
    assert "run    runs/config-2" in second.out
    assert f"in use by process {first.pid} on " in second.out
    wait_for_step(first, jaxdist.run, 30)
    seen = jaxdist("eval", jaxdist.run)
    assert seen.code == 0, seen
    first.send_signal(signal.SIGTERM)
    stopped = finish(first)
    assert (stopped.code, stopped.err) == (75, ""), stopped
    recorded = [r["step"] for r in metrics(jaxdist.run) if r["split"] == "train"]
    assert recorded == [*range(1, len(recorded) + 1)]
    assert not (jaxdist.run / "run.lock").exists()
