"""A deposed generation can neither save nor log, wherever it was suspended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.checkpoint import layout, store
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError, RunError
from jaxdist.heartbeat.fence import RunFence, newest_generation, newest_of_all
from jaxdist.heartbeat.run_folder import FENCE, FOLDER, GENERATION, RunFolder, run_folder_of
from jaxdist.metrics.writer import MetricsWriter, read_metrics
from jaxdist.run.lock import HeldError, RunLock

STATE = {"x": jnp.arange(6.0)}


def begun(run: Path, generation: int) -> RunFence:
    fence = RunFence(run, generation)
    fence.raise_()
    return fence


def checkpoints(run: Path, fence: RunFence | None, said: list[str] | None = None):
    say = (lambda line: None) if said is None else said.append
    return CheckpointStore(run / "c", keep=3, keep_best=False, on_event=say, fence=fence)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_marks_only_ever_rise(tmp_path_factory, numbers):
    run = tmp_path_factory.mktemp("run")
    newest = 0
    for number in numbers:
        fence = RunFence(run, number)
        if number >= newest:
            fence.raise_()
            newest = number
        else:
            with pytest.raises(
                RunError, match=f"replaced by generation {newest}: this process stops writing"
            ):
                fence.raise_()
        assert newest_generation(run) == newest


def test_the_generation_stands_in_the_manifest(tmp_path: Path):
    for run, fence in ((tmp_path / "a", begun(tmp_path / "a", 7)), (tmp_path / "b", None)):
        with checkpoints(run, fence) as kept:
            kept.save(3, STATE, metadata={})
        manifest = read_manifest(layout.step_directory(run / "c", 3))
        expected = (7, 4) if fence else (None, 2)
        assert (manifest.generation, manifest.format) == expected
    told = json.loads((tmp_path / "b/c/step_00000003/manifest.json").read_text())
    assert "generation" not in told["manifest"]  # who reads format 2 reads it


def test_who_was_deposed_begins_no_save(tmp_path: Path):
    with checkpoints(tmp_path, begun(tmp_path, 1)) as old:
        old.save(1, STATE, metadata={})
        old.wait()
        begun(tmp_path, 2)
        with pytest.raises(RunError, match=r"generation 1 of .* was replaced by generation 2"):
            old.save(2, STATE, metadata={})
    assert layout.steps_present(tmp_path / "c") == [1]


def test_who_was_deposed_while_it_wrote_does_not_commit(tmp_path: Path, monkeypatch):
    """The next generation has begun, and written nothing yet, when the old one seals."""
    true, old = store.seal, checkpoints(tmp_path, begun(tmp_path, 1))

    def seal(*args, **given):
        found = true(*args, **given)
        begun(tmp_path, 2)
        return found

    monkeypatch.setattr(store, "seal", seal)
    old.save(5, STATE, metadata={})
    with pytest.raises(CheckpointError, match=r"generation 1 of .* was replaced by generation 2"):
        old.wait()
    old.close()
    assert layout.steps_present(tmp_path / "c") == []


def test_who_comes_late_clears_nothing_away(tmp_path: Path):
    old = begun(tmp_path, 1)
    new = checkpoints(tmp_path, begun(tmp_path, 2))
    half = layout.staging_directory(tmp_path / "c", 5, 2)
    half.mkdir()
    with pytest.raises(RunError, match="replaced by generation 2"):
        checkpoints(tmp_path, old)
    assert half.exists()
    new.close()


@pytest.mark.parametrize("saves", [False, True])
def test_who_was_suspended_before_it_commits_takes_nothing_of_the_next(
    tmp_path: Path, monkeypatch, saves: bool
):
    """It had looked at the fence; the next has meanwhile begun, or even a save of that step."""
    true, old = layout.commit, checkpoints(tmp_path, begun(tmp_path, 1))
    new: list[CheckpointStore] = []

    def suspended(staging: Path, final: Path) -> None:
        monkeypatch.setattr(layout, "commit", true)
        new.append(checkpoints(tmp_path, begun(tmp_path, 2)))
        # What it is about to write: half of it is there.
        half = layout.staging_directory(tmp_path / "c", 5, 2)
        half.mkdir()
        (half / "half").write_text("")
        if saves:
            new[0].save(5, {"x": STATE["x"] + 1}, metadata={})
            new[0].wait()
        true(staging, final)

    monkeypatch.setattr(layout, "commit", suspended)
    old.save(5, STATE, metadata={})
    with pytest.raises(CheckpointError, match="No such file"):
        old.wait()
    # Nor does it clear away what is not its own.
    assert layout.staging_directory(tmp_path / "c", 5, 2).exists() is not saves
    assert layout.steps_present(tmp_path / "c") == ([5] if saves else [])
    if saves:
        assert read_manifest(layout.step_directory(tmp_path / "c", 5)).generation == 2
    for one in (old, *new):
        one.close()


def test_who_was_deposed_logs_nothing(tmp_path: Path):
    old = begun(tmp_path, 1)
    with MetricsWriter(tmp_path, resume_step=None, admit=old.check) as late:
        late.write(1, {"loss": 1.0})
        new = begun(tmp_path, 2)
        with pytest.raises(RunError, match="replaced by generation 2"):
            late.write(2, {"loss": 2.0})
        # One that had looked already, and was suspended then, writes into what is no more there.
        with MetricsWriter(tmp_path, resume_step=1, admit=new.check) as writer:
            late._file.write('{"step": 2, "split": "train", "loss": 3.0}\n')
            late._file.flush()
            writer.write(2, {"loss": 4.0})
    assert [(one["step"], one["loss"]) for one in read_metrics(tmp_path)] == [(1, 1.0), (2, 4.0)]


def test_a_deposed_generation_loses_the_lock_though_it_lives(tmp_path: Path, monkeypatch):
    def of(generation: int, fence: str = "r") -> None:
        place = RunFolder(tmp_path / "place", generation, fence)
        for key, value in place.environ().items():
            monkeypatch.setenv(key, value)
        assert run_folder_of(os.environ) == place

    run = tmp_path / "run"
    of(3)
    old = RunLock(run, say=lambda line: None)
    for generation, fence in ((3, "r"), (2, "r"), (4, "another")):
        of(generation, fence)
        with pytest.raises(HeldError):
            RunLock(run, say=lambda line: None)
    of(4)
    new = RunLock(run, say=lambda line: None)
    old.release()  # it takes away nothing of the other's
    assert json.loads(new.path.read_text())["generation"] == 4
    for key in (FOLDER, GENERATION, FENCE):
        monkeypatch.delenv(key)
    with pytest.raises(HeldError):
        RunLock(run, say=lambda line: None)
    new.release()


def test_the_newest_of_a_run_and_those_beside_it(tmp_path: Path):
    base = tmp_path / "run"
    assert newest_of_all(base) == 0
    begun(base, 2)
    begun(tmp_path / "run-2", 9)
    begun(tmp_path / "running", 30)
    assert newest_of_all(base) == 9


def test_what_a_late_worker_of_an_older_generation_left_is_cleared(tmp_path: Path):
    """It wrote on after the next generation had looked; its own and other files stay."""
    new = checkpoints(tmp_path, begun(tmp_path, 3))
    folder = tmp_path / "c"
    late = [".tmp-g1-step_00000004", ".tmp-g2-step_00000005", ".tmp-deleted-g2-step_00000005"]
    for name in (*late, ".tmp-g12-step_00000006", ".tmp-g3-step_00000009"):
        (folder / name / "arrays").mkdir(parents=True)
    new.save(5, STATE, metadata={})
    new.wait()
    left = {path.name for path in folder.glob(".tmp-*")}
    assert left == {".tmp-g12-step_00000006", ".tmp-g3-step_00000009"}
    (folder / late[0]).mkdir()
    new.close()
    assert {path.name for path in folder.glob(".tmp-*")} == left


@pytest.mark.parametrize("process", [0, 1])
def test_who_was_deposed_takes_away_what_it_has_written(tmp_path: Path, monkeypatch, process: int):
    old = checkpoints(tmp_path, begun(tmp_path, 1))
    old._primary = process == 0
    staging = layout.staging_directory(tmp_path / "c", 5, 1)
    (staging / "arrays").mkdir(parents=True)
    begun(tmp_path, 2)
    half = layout.staging_directory(tmp_path / "c", 5, 2)
    half.mkdir()
    assert "saving step 5" in old._abandon(5, RunError("deposed"))
    assert (staging.exists(), half.exists()) == (False, True)
