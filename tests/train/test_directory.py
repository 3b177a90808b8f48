import json
import os

import pytest

from jaxdist.errors import RunError
from jaxdist.train.directory import RunDirectory, choose, prepare


def begin(path):
    prepare(RunDirectory(path), "seed: 0\n")


def test_a_new_run_never_takes_an_occupied_directory(tmp_path):
    base = tmp_path / "runs" / "gpt"
    assert choose(base, resume=False).path == base
    begin(base)
    assert choose(base, resume=False).path == tmp_path / "runs" / "gpt-2"
    begin(tmp_path / "runs" / "gpt-2")
    assert choose(base, resume=False).path == tmp_path / "runs" / "gpt-3"


def test_a_resume_takes_the_newest(tmp_path):
    base = tmp_path / "gpt"
    assert choose(base, resume=True).path == base
    begin(base)
    assert choose(base, resume=True).path == base
    begin(tmp_path / "gpt-2")
    assert choose(base, resume=True).path == tmp_path / "gpt-2"


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
