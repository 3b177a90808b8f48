"""Folders of snapshots on a machine's own disk: one for each run, and none that nobody needs."""

import shutil

import pytest

from jaxdist.checkpoint.identity import Identity, write_identity
from jaxdist.checkpoint.local import claim, local_folder
from jaxdist.errors import CheckpointError


@pytest.fixture
def ssd(tmp_path):
    """A disk with a snapshot of step 20 of a run that was stopped after its checkpoint of 16."""
    run = tmp_path / "gpt"
    run.mkdir()
    write_identity(run, Identity("a1"))
    (run / "checkpoints" / "step_00000016").mkdir(parents=True)
    folder = claim(tmp_path / "ssd", Identity("a1", run))
    (folder / "step_00000020.0_of_1").touch()
    return tmp_path / "ssd"


def others_after(ssd, name="gpt-2"):
    """What lies beside the folder of a run that begins now."""
    own = claim(ssd, Identity("b2", ssd.parent / name))
    return sorted(path.name for path in ssd.iterdir() if path != own)


def test_each_run_has_a_folder_of_its_own_also_under_one_path(ssd, tmp_path):
    assert others_after(ssd, "gpt") == ["gpt-a1"]
    again = claim(ssd, Identity("a1", tmp_path / "gpt"))
    assert (again / "step_00000020.0_of_1").exists()


def test_what_a_resume_needs_stays(ssd):
    assert others_after(ssd) == ["gpt-a1"]


def test_what_is_no_newer_than_a_checkpoint_goes(ssd, tmp_path):
    (tmp_path / "gpt" / "checkpoints" / "step_00000020").mkdir()
    (tmp_path / "gpt" / "run.lock").touch()
    assert others_after(ssd) == ["gpt-a1"]  # somebody is at work there
    (tmp_path / "gpt" / "run.lock").unlink()
    assert others_after(ssd) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_of_a_run_that_was_deleted_goes(ssd, tmp_path, replaced):
    shutil.rmtree(tmp_path / "gpt")
    if replaced:
        (tmp_path / "gpt").mkdir()
        write_identity(tmp_path / "gpt", Identity("a2"))
    assert others_after(ssd) == []


def test_what_is_of_a_disk_that_is_away_or_of_nobody_stays(ssd, tmp_path):
    away = claim(ssd, Identity("c3", tmp_path / "away" / "gpt"))
    (ssd / "something").mkdir()
    assert set(others_after(ssd)) == {"gpt-a1", away.name, "something"}


def test_a_disk_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    run = Identity("a1", tmp_path / "gpt")
    assert local_folder(tmp_path / "file", run).name == "gpt-a1"
    with pytest.raises(
        CheckpointError, match=r"cannot be kept in .*choose another checkpoint.local"
    ):
        claim(tmp_path / "file", run)
