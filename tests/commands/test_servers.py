"""A request for another number of table servers: who takes it, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.commands.servers import ask_for_servers, run_of_workers, serve_here
from jaxdist.errors import ConfigError, RunError
from jaxdist.tables.training.request import FILE_NAME, take_request

SECTIONS: dict[str, Any] = {
    "model": {"type": "dlrm", "width": 4, "bottom": [4], "top": [4]},
    "data": {"type": "clicks", "fields": 3, "ids": 50, "examples": 64, "heldout_examples": 8},
    "optim": {"type": "sgd", "learning_rate": 0.5},
    "train": {"steps": 4, "batch_size": 8},
}
HYBRID = {"type": "hybrid", "servers": 2, "ranges": 6, "replicas": 2}


def run(folder: Path, strategy: Any, *, ended: bool = False) -> Path:
    (folder / "config.yaml").write_text(json.dumps({**SECTIONS, "strategy": strategy}))
    if not ended:
        (folder / "run.lock").touch()
    return folder


def test_a_run_takes_a_request_once(tmp_path: Path) -> None:
    run(tmp_path, HYBRID)
    taken: list[int] = []

    def take() -> None:
        while not taken:
            taken.extend(filter(None, [take_request(tmp_path)]))
            time.sleep(0.01)

    thread = threading.Thread(target=take)
    thread.start()
    result = CliRunner().invoke(app, ["servers", str(tmp_path), "5", "--json", str(tmp_path / "a")])
    thread.join()
    assert result.exit_code == 0, result.exception
    assert "changes the number of its table servers to 5" in result.output
    assert json.loads((tmp_path / "a").read_text())["servers"] == 5
    assert taken == [5]
    assert take_request(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[3]", '{"servers": "3"}', '{"servers": 0}'])
def test_a_file_that_is_no_request_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert take_request(tmp_path) is None


@pytest.mark.parametrize(
    ("strategy", "servers", "message"),
    [
        ({"type": "synchronous"}, 3, "has strategy.type synchronous: give a run with"),
        (HYBRID, 7, "7 servers are too many for 6 ranges of rows: .* strategy.ranges: 7 or more"),
        (HYBRID, 1, "1 servers are too few for replicas 2: .* ask for 2 or more"),
        (
            {"type": "hybrid", "processes": {"port": 4000}},
            1,
            "processes.port is 4000, but .*port: 0",
        ),
        (HYBRID, 3, "no process of the run .* has read the request in 0.1 s"),
    ],
)
def test_what_a_run_cannot_do_is_told(
    tmp_path: Path, strategy: Any, servers: int, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        ask_for_servers(run(tmp_path, strategy), servers, patience_seconds=0.1)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_run_without_servers_takes_none_of_this_host(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"type hybrid or parameter_server to this command"):
        serve_here(run(tmp_path, {"type": "synchronous"}), None, print)


def test_a_run_that_has_ended_takes_no_request(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has ended: continue it with jaxdist train --resume"):
        ask_for_servers(run(tmp_path, HYBRID, ended=True), 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give either the number of table servers or --here"),
        (["3", "--here"], "give either the number of table servers or --here"),
        (["3", "--host", "10.0.0.2"], "--host is the address of the server that --here starts"),
        (["3", "--wait", "9"], "--wait is the time for which --here waits for the run: add --here"),
    ],
)
def test_a_number_of_servers_or_one_on_this_host(
    tmp_path: Path, given: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["servers", str(run(tmp_path, HYBRID)), *given])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_run_at_fixed_ports_takes_no_server_of_another_host(tmp_path: Path) -> None:
    fixed = {"type": "hybrid", "processes": {"port": 4000}}
    with pytest.raises(RunError, match=r"processes\.port is 4000, .*port: 0"):
        serve_here(run(tmp_path, fixed), None, print)


def test_a_run_whose_directory_cannot_be_written(tmp_path: Path) -> None:
    run(tmp_path, HYBRID)
    (tmp_path / f".{FILE_NAME}").mkdir()
    with pytest.raises(RunError, match="cannot be written: Is a directory; use the account"):
        ask_for_servers(tmp_path, 3)


def test_workers_of_several_processes_need_the_run_directory_of_all(tmp_path: Path) -> None:
    strategy = {"type": "parameter_server", "workers": 2}
    config = run(tmp_path, strategy) / "config.yaml"
    assert run_of_workers(str(config), ["run.directory=there"]) == Path("there")
    assert run_of_workers(str(config), ["strategy={type: synchronous}"]) is None
    processes = ["--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "1"]
    result = CliRunner().invoke(app, ["train", str(config), *processes])
    assert isinstance(result.exception, ConfigError)
    assert "in 2 processes needs --resume, so that all of them find" in str(result.exception)
