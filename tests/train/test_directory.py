import json
import os

import pytest

from jaxdist.errors import RunError
from jaxdist.train.directory import RunDirectory, prepare, take
from jaxdist.train.lock import RunLock, this_process


def begin(path):
    prepare(RunDirectory(path), "seed: 0\n")


def chosen(base, *, named=False, resume=False, said=None):
    """The name that a run takes, which it gives back at once."""
    say = [].append if said is None else said.append
    directory, lock = take(base, named=named, resume=resume, say=say)
    lock.release()
    return directory.path.name


@pytest.mark.parametrize("named", [False, True])
def test_a_new_run_never_takes_an_occupied_directory(tmp_path, named):
    base = tmp_path / "runs" / "gpt"
    assert chosen(base, named=named) == "gpt"
    begin(base)
    assert chosen(base, named=named) == "gpt-2"
    begin(tmp_path / "runs" / "gpt-2")
    assert chosen(base, named=named) == "gpt-3"


def test_a_resume_takes_the_newest(tmp_path):
    base = tmp_path / "gpt"
    assert chosen(base, resume=True) == "gpt"
    begin(base)
    assert chosen(base, resume=True) == "gpt"
    begin(tmp_path / "gpt-2")
    assert chosen(base, resume=True) == "gpt-2"


@pytest.mark.parametrize("built", [False, True])
def test_beside_a_live_run(tmp_path, built):
    """Before it has written a thing, and after."""
    base = tmp_path / "gpt"
    said = []
    with RunLock(base, say=pytest.fail):
        if built:
            begin(base)
        assert chosen(base, said=said) == "gpt-2"
        for options in ({"named": True}, {"resume": True}):
            with pytest.raises(RunError, match="gpt is in use by process"):
                chosen(base, **options)
    (line,) = said
    assert line.startswith(f"run directory {base} is in use by process")
    assert line.endswith(": this run takes the next name")


def test_two_new_runs_at_once_and_a_third_that_is_named(tmp_path):
    begin(tmp_path / "gpt")
    with RunLock(tmp_path / "gpt-2", say=pytest.fail):
        said = []
        assert chosen(tmp_path / "gpt", said=said) == "gpt-3"
        assert "gpt-2 is in use by process" in said[0]
        with pytest.raises(RunError, match="gpt-2 is in use"):
            chosen(tmp_path / "gpt", named=True)
        with pytest.raises(RunError, match="gpt-2 is in use"):
            chosen(tmp_path / "gpt", resume=True)


def test_a_run_that_died_before_it_wrote_anything_is_passed_over(tmp_path):
    begin(tmp_path / "gpt")
    (tmp_path / "gpt-2").mkdir()
    (tmp_path / "gpt-2" / "run.lock").write_text(json.dumps(this_process()))
    assert chosen(tmp_path / "gpt", resume=True) == "gpt"
    (tmp_path / "gpt-2" / "run.lock").write_text(json.dumps(this_process()))
    assert chosen(tmp_path / "gpt") == "gpt-2"


def test_it_holds_the_config_and_versions(tmp_path):
    begin(tmp_path / "a")
    directory = RunDirectory(tmp_path / "a")
    assert directory.config.read_text() == "seed: 0\n"
    assert {"python", "jax", "jaxdist"} <= json.loads(directory.versions.read_text()).keys()
    assert sorted(os.listdir(tmp_path / "a")) == ["config.yaml", "versions.json"]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.run cannot be written: .*run.directory="):
        begin(tmp_path / "file" / "run")
