"""Folders in memory: who is killed leaves one behind, and the next agent takes it away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.heartbeat import run_folder
from jaxdist.heartbeat.run_folder import held, left_behind, new_folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(run_folder, "YOUNG_SECONDS", -1.0)
    return tmp_path


def made(memory: Path, name: str) -> Path:
    """As an agent has left it behind that was killed."""
    folder = memory / f"jaxdist-{name}"
    (folder / "snapshots").mkdir(parents=True)
    with held(folder):
        assert left_behind() == []
    return folder


def test_what_killed_agents_have_left_goes_with_the_next(memory: Path):
    old = made(memory, "old")
    assert left_behind() == [old]
    (memory / "jaxdist-others").mkdir()  # without a lock: it is just made, or another's
    (memory / "more").mkdir()
    with new_folder() as one, new_folder() as two:
        assert not old.exists()
        assert {one.parent, two.parent} == {memory}
        assert sorted(path.name[:8] for path in memory.iterdir()) == ["jaxdist-"] * 3 + ["more"]
    assert not one.exists()


def test_a_process_that_saves_after_its_agent_was_killed_keeps_the_folder(memory: Path):
    folder = memory / "jaxdist-old"
    folder.mkdir()
    with held(folder) as descriptor:
        given = {"stdin": subprocess.PIPE, "pass_fds": [descriptor]}
        process = subprocess.Popen([sys.executable, "-c", "input()"], **given)
    assert left_behind() == []
    process.communicate(b"\n")
    assert left_behind() == [folder]


def test_a_folder_that_was_just_made_is_not_taken(memory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_folder, "YOUNG_SECONDS", 60.0)
    folder = made(memory, "new")
    with new_folder():
        assert folder.exists()
