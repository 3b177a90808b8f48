"""Checkpoints that are torn or changed, and disks that are full: told, and nothing else is lost."""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Jaxdist, assert_same_run, finish, steps, wait_for_step

from jaxdist.commands.replay.lives import life_of
from jaxdist.errors import RunError
from jaxdist.heartbeat.journal import read_journal
from jaxdist.metrics.writer import read_metrics


def files_of(run: Path, step: int) -> list[Path]:
    folder = run / "checkpoints" / f"step_{step:08d}"
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def damaged(trained: Jaxdist, name: str) -> Path:
    return next(path for path in files_of(trained.run, 24) if path.name == name)


@pytest.mark.parametrize("how", ["flip", "truncate", "manifest"])
@pytest.mark.every(3)
def test_the_one_before_is_used_and_the_run_goes_on(
    trained: Jaxdist, finished: tuple[Path, str], how: str
) -> None:
    file = max(files_of(trained.run, 24), key=lambda path: path.stat().st_size)
    if how == "flip":
        flip(file, random.Random(0))
    elif how == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file = damaged(trained, "manifest.json")
        file.unlink()
    resumed = trained.here("train", "config.yaml", "--resume")
    assert resumed.code == 0, resumed
    assert "checkpoint: " in resumed.out
    assert "step_00000024 is damaged" in resumed.out
    assert file.name in resumed.out
    assert "trying step 16 next" in resumed.out
    assert "resume from step 16 of 24" in resumed.out
    assert_same_run(trained.run, finished[0] / "runs/config")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(14))
def test_one_bit_of_any_file(trained: Jaxdist, number: int) -> None:
    files = files_of(trained.run, 24)
    assert len(files) >= 14
    flip(files[number], random.Random(number))
    seen = trained("eval", trained.run)
    assert seen.code == 0, seen
    assert files[number].name in seen.out
    assert "step   16\n" in seen.out


def test_all_damaged_is_an_error(trained: Jaxdist) -> None:
    for step in steps(trained.run):
        flip(files_of(trained.run, step)[-1], random.Random(step))
    config = (trained.run / "config.yaml").read_text()
    refused = trained.here("train", "config.yaml", "--resume")
    assert refused.code == 3
    assert "can be used: step 24: metadata.json: the content does not" in refused.message
    assert "there is no other checkpoint to try" in refused.out
    assert steps(trained.run) == [16, 24]
    assert (trained.run / "config.yaml").read_text() == config


@pytest.fixture
def small_disk(jaxdist: Jaxdist, mount_tmpfs: Callable[[Path, int], Path]) -> Iterator[Path]:
    yield mount_tmpfs(jaxdist.folder / "disk", 4 << 20)
    jaxdist.kill()  # nobody may write there when the disk is taken away


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_good_checkpoint(jaxdist: Jaxdist, small_disk: Path) -> None:
    run = small_disk / "run"
    jaxdist.config(checkpoint={"every": 8, "keep": 100}, run={"directory": str(run)})
    assert jaxdist.train("train.steps=16").code == 0
    ballast = small_disk / "ballast"
    for pages in range(6):  # with few the metrics find none, then their events, then the arrays
        ballast.write_bytes(b"")
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - pages * mmap.PAGESIZE))
        full = jaxdist.train("--resume")
        assert (full.code, full.err.count("\n")) == (3, 1), (pages, full)
        assert full.err.startswith("error: ")
        assert steps(run) == [8, 16]
    assert f"error: saving step 24 in {run / 'checkpoints'} failed: the disk is full" in full.err
    assert "the last good checkpoint is step 16" in full.err
    ballast.unlink()
    resumed = jaxdist.train("--resume")
    assert resumed.code == 0, resumed
    assert "resume from step 16 of 24" in resumed.out
    whole = jaxdist.train(f"run.directory={jaxdist.folder / 'whole'}")
    assert whole.code == 0, whole
    assert_same_run(run, jaxdist.folder / "whole")


@pytest.mark.full
def test_a_run_whose_directory_is_deleted_says_so_once(jaxdist: Jaxdist) -> None:
    jaxdist.config(train={"steps": 100_000}, checkpoint={"every": 7})
    process = jaxdist.start("train", "config.yaml")
    wait_for_step(process, jaxdist.run, 20)
    # In one rename: files that are made while a tree is deleted would keep it.
    jaxdist.run.rename(jaxdist.folder / "elsewhere")
    ended = finish(process)
    assert (ended.code, ended.err.count("\n")) == (3, 1), ended
    # Whoever looks next; what writes the arrays may have made directories anew.
    told = r"checkpoints is gone; |metrics.jsonl was removed.* while "
    assert re.search(told, ended.message), ended
    assert "done" not in ended.out


@pytest.mark.parametrize("how", ["text", "pipe", "list", "nested"])
@pytest.mark.every(3)
def test_a_damaged_config_is_told_and_the_run_goes_on(trained: Jaxdist, how: str) -> None:
    config = trained.run / "config.yaml"
    config.unlink()
    if how == "pipe":
        os.mkfifo(config)
    else:
        config.write_text({"text": "a: [\0", "list": "[1]", "nested": "[" * 9999}[how])
    done = trained.here("train", "config.yaml", "--resume", "train.steps=24")
    assert done.code == 0, done
    words = " ".join(done.out.split())
    assert (
        "since this run began: the changes are unknown, because runs/config/config.yaml is damaged"
        in words
    )
    assert "resume from step 24 of 24" in words
    assert config.read_text().startswith("model:")


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "elastic.jsonl")
    with pytest.raises(RunError, match=r"elastic.jsonl cannot be read: it is a pipe"):
        read_journal(tmp_path)
    (tmp_path / "elastic.jsonl").unlink()
    (tmp_path / "elastic.jsonl").write_text('3\n{"event": "lost"}\n' + "[" * 9999)
    assert read_journal(tmp_path) == [{"event": "lost"}]


def test_metrics_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match=r"no metrics can be read from .*: it is a pipe"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text("[" * 9999 + '\n{"step": "x", "split": "train"}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl:1 is not a metrics record"):
        read_metrics(tmp_path)


def test_a_lost_list_of_workers_is_named(tmp_path: Path) -> None:
    (tmp_path / "order").mkdir()
    (tmp_path / "order" / "server_0.from_0.jsonl").touch()
    (tmp_path / "order" / "clients.jsonl").write_text("[1]\n")
    (tmp_path / "shards" / "server_0" / "step_00000002").mkdir(parents=True)
    with pytest.raises(RunError, match=r"clients.jsonl does not record the actions of each worker"):
        life_of(tmp_path, 1)
