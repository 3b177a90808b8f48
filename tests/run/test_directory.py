import json
import os
import re
import shutil

import pytest

from jaxdist.checkpoint.identity import Identity, new_id, read_identity
from jaxdist.errors import RunError
from jaxdist.run.directory import RunDirectory, prepare_directory, take_directory
from jaxdist.run.lock import RunLock, this_process


def begin(path, asked=None):
    identity = None if asked is None else Identity(new_id(), asked=asked)
    prepare_directory(RunDirectory(path, identity), "seed: 0\n")


def chosen(base, *, named=False, resume=False, said=None, **given):
    """The name that a run takes, which it gives back at once."""
    say = [].append if said is None else said.append
    taken = take_directory(base, named=named, resume=resume, say=say, **given)
    taken.lock.release()
    return taken.directory.path.name


@pytest.mark.parametrize("named", [False, True])
def test_a_new_run_never_takes_an_occupied_directory(tmp_path, named):
    base = tmp_path / "runs" / "gpt"
    assert chosen(base, named=named) == "gpt"
    begin(base)
    assert chosen(base, named=named) == "gpt-2"
    begin(tmp_path / "runs" / "gpt-2")
    said = []
    assert chosen(base, named=named, said=said) == "gpt-3"
    # Only a user who named the directory expects the run in that directory.
    hint = f"{base} holds an earlier run, which --resume continues; this run uses {base}-3"
    assert said == [hint] * named


def test_a_resume_takes_the_one_run_that_has_begun(tmp_path):
    base = tmp_path / "gpt"
    assert chosen(base, resume=True) == "gpt"
    begin(base)
    assert chosen(base, resume=True) == "gpt"
    begin(tmp_path / "gpt-2", asked="gpt")
    shutil.rmtree(base)
    assert chosen(base, resume=True) == "gpt-2"


def test_a_resume_refuses_to_guess_which_of_several_runs_is_meant(tmp_path):
    """The first was deleted and begun again after the second: a name does not tell which."""
    base = tmp_path / "gpt"
    begin(tmp_path / "gpt-2", asked="gpt")
    (tmp_path / "gpt-2" / "checkpoints" / "step_00000024").mkdir(parents=True)
    begin(base)
    with pytest.raises(RunError) as caught:
        chosen(base, resume=True)
    words = str(caught.value)
    assert "2 runs have begun under the name" in words
    assert re.search(r"/gpt \(no checkpoint, begun \d{4}-", words)
    assert re.search(r"/gpt-2 \(step 24, begun \d{4}-", words)
    assert "run.directory=PATH on the command line" in words
    assert sorted(os.listdir(base)) == ["config.yaml", "run.json", "versions.json"]


def test_a_resume_takes_the_directory_that_the_command_names(tmp_path):
    base, said = tmp_path / "gpt", []
    begin(base)
    begin(tmp_path / "gpt-2", asked="gpt")
    assert chosen(base, resume=True, exact=True, said=said) == "gpt"
    assert "other runs with this name" in said[0]
    assert "gpt-2 (no checkpoint" in said[0]
    assert chosen(tmp_path / "gpt-2", resume=True, exact=True) == "gpt-2"


def test_a_resume_of_a_name_without_a_run_is_refused_where_others_have_begun(tmp_path):
    begin(tmp_path / "gpt-2", asked="gpt")
    with pytest.raises(RunError, match=r"no run has begun in .*gpt, but .*gpt-2 .*without --res"):
        chosen(tmp_path / "gpt", resume=True, exact=True)


def test_the_run_of_another_config_is_no_candidate(tmp_path):
    """Configs may be called gpt.yaml and gpt-2.yaml."""
    begin(tmp_path / "gpt")
    begin(tmp_path / "gpt-2")
    assert chosen(tmp_path / "gpt", resume=True) == "gpt"
    begin(tmp_path / "gpt-3", asked="gpt")
    assert chosen(tmp_path / "gpt-3", resume=True) == "gpt-3-2"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_later_generation_goes_on_in_its_run_whatever_is_beside_it(tmp_path, resume, known):
    """With the path or, where a process died before it could tell it, by the id alone."""
    base = tmp_path / "gpt"
    begin(tmp_path / "gpt-2", asked="gpt")
    run = Identity("a1", base if known else None)
    first = take_directory(base, named=False, resume=False, say=pytest.fail, run=Identity("a1"))
    prepare_directory(first.directory, "seed: 0\n")
    first.lock.release()
    assert first.directory.path == base
    second = take_directory(base, named=False, resume=resume, say=pytest.fail, run=run)
    second.lock.release()
    assert (second.directory.path, second.goes_on) == (base, True)


def test_a_later_generation_refuses_a_directory_that_is_another_runs(tmp_path):
    base = tmp_path / "gpt"
    begin(base)
    with pytest.raises(
        RunError, match=r"gpt is run \w+, begun .*, but this process continues run a1"
    ):
        chosen(base, run=Identity("a1", base))
    (base / "run.json").unlink()
    with pytest.raises(RunError, match=r"gpt has no id, but this process continues run a1"):
        chosen(base, run=Identity("a1", base))
    assert not (base / "run.lock").exists()
    prepare_directory(RunDirectory(base, Identity("a2")), "")
    with pytest.raises(RunError, match="is run a2"):
        prepare_directory(RunDirectory(base, Identity("a3")), "")


def test_a_run_from_before_there_were_ids_gets_one_and_goes_on(tmp_path):
    base = tmp_path / "gpt"
    base.mkdir()
    (base / "config.yaml").write_text("seed: 0\n")
    taken = take_directory(base, named=False, resume=True, say=pytest.fail)
    taken.lock.release()
    found = read_identity(base)
    assert found is not None
    assert taken.directory.identity == found
    assert chosen(base, run=Identity.of(found.plain)) == "gpt"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": 3}', '{"id": ""}', "[" * 9999])
def test_a_damaged_identity_is_named(tmp_path, text):
    begin(tmp_path / "gpt")
    (tmp_path / "gpt" / "run.json").write_text(text)
    with pytest.raises(
        RunError, match=r"gpt/run.json cannot be used: .* remove the file, after which the next"
    ):
        chosen(tmp_path / "gpt", resume=True)


def test_an_identity_that_is_a_pipe_is_named(tmp_path):
    begin(tmp_path / "gpt")
    (tmp_path / "gpt" / "run.json").unlink()
    os.mkfifo(tmp_path / "gpt" / "run.json")
    with pytest.raises(
        RunError, match=r"run.json cannot be used: it is a pipe, not a regular file"
    ):
        chosen(tmp_path / "gpt", resume=True)


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
    assert line.endswith(": this run uses the next free name")


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
    assert sorted(os.listdir(tmp_path / "a")) == ["config.yaml", "run.json", "versions.json"]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.run cannot be written: .*run.directory="):
        begin(tmp_path / "file" / "run")
