"""Processes of a run refuse a directory that is another run's by now."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxdist.checkpoint.identity import Identity, write_identity
from jaxdist.errors import RunError
from jaxdist.param_server.processes.setup import run_of
from jaxdist.run.directory import RunDirectory
from jaxdist.run.report.end import going_on
from jaxdist.run.train import _check_everywhere


def test_a_server_or_worker_refuses_the_directory_of_another_run(tmp_path):
    write_identity(tmp_path, Identity("a1"))
    assert run_of({"run": Identity("a1", tmp_path).plain}) == tmp_path
    with pytest.raises(RunError, match=r"is run a1, begun .*, but this process continues run b2"):
        run_of({"run": Identity("b2", tmp_path).plain})


def test_a_process_that_sees_another_run_at_the_path_refuses_it(tmp_path, monkeypatch):
    """A path on this machine's own disk is another directory on each machine."""
    write_identity(tmp_path, Identity("a1"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    _check_everywhere(tmp_path, "a1")
    _check_everywhere(tmp_path / "begins just now", "b2")
    with pytest.raises(RunError, match="is run a1"):
        _check_everywhere(tmp_path, "b2")


def test_the_other_processes_refuse_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxdist.run.train.any_process", lambda found: True)
    with pytest.raises(
        RunError, match=r"found a different run at .* than b2: .*all machines share"
    ):
        _check_everywhere(tmp_path, "b2")


@pytest.mark.parametrize(
    ("name", "words"), [("gpt", "--resume"), ("gpt-2", "--resume run.directory=runs/gpt-2")]
)
def test_a_run_that_stops_says_how_it_is_resumed_beside_others(name, words):
    directory = RunDirectory(Path("runs") / name, Identity("a1", asked="gpt"))
    whole: Any = SimpleNamespace(checkpoint=SimpleNamespace(parts=None))
    assert going_on(whole, directory) == f"continue with the same command and {words}"
