"""Every command that opens a path which the user names, with paths that cannot be what it needs."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from documents import ROOT
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import JaxdistError

MEETING = ["--rendezvous", "meet"]
CONFIG = "quickstart.yaml"
READ = {
    "train config": ["train", "@"],
    "agent config": ["agent", "@", *MEETING],
    "agent token_file": ["agent", CONFIG, *MEETING, "--token-file", "@"],
    "drill config": ["drill", "@", "--failures", "1"],
    "eval run": ["eval", "@"],
    "generate run": ["generate", "@", "--prompt", "a"],
    "eject config": ["eject", "@"],
    "replay run": ["replay", "@"],
    "servers run": ["servers", "@", "2"],
    "prove config": ["prove", "@"],
    "export run": ["export", "@", "exported"],
    "import model": ["import", "@", "--out", "imported"],
    "import config": ["import", "adir", "--config", "@", "--table", "file", "--out", "imported"],
    "report runs": ["report", "@"],
    "parity config": ["parity", "@"],
    "inspect config": ["inspect", "@"],
    "inspect diff": ["inspect", CONFIG, "--diff", "@"],
    "audit config": ["audit", "@"],
    "plan config": ["plan", "@", "--on", "v5e:2x4"],
    "launch job config": ["launch", "job", "@"],
    "launch status folder": ["launch", "status", "@"],
    "launch logs folder": ["launch", "logs", "@"],
    "launch stop folder": ["launch", "stop", "@"],
    "config show config": ["config", "show", "@"],
    "data tokenize files": ["data", "tokenize", "out.json", "@"],
    "pipeline show schedule": ["pipeline", "show", "./@"],
    "pipeline check file": ["pipeline", "check", "@"],
    "study compare config": ["study", "compare", "@", "--variant", "a=train.steps=1"],
    "study batch-scaling config": ["study", "batch-scaling", "@", "--batches", "8,16"],
    "study run file": ["study", "run", "@"],
    "study review settings": ["study", "review", "@"],
    "simulate servers config": ["simulate", "servers", "@"],
    "simulate choice settings": ["simulate", "choice", "@"],
    "simulate fleet settings": ["simulate", "fleet", "@"],
}
"""By command and parameter, which `named` checks; @ is the path."""
SCHEDULE = ["pipeline", "show", "1f1b", "--stages", "2", "--microbatches", "2"]
WRITTEN = {
    "eject out": ["eject", "digits.yaml", "--out", "@"],
    "init to": ["init", "gpt/quickstart", "--to", "@"],
    "data tokenize out": ["data", "tokenize", "@", "text.txt", "--vocab-size", "300"],
    "report html": ["report", "arun", "--html", "@"],
    "pipeline show svg": [*SCHEDULE, "--svg", "@"],
    "pipeline show trace": [*SCHEDULE, "--trace", "@"],
    "pipeline show csv": [*SCHEDULE, "--csv", "@"],
}
ELSEWHERE = {"json_file", "plot", "write", "record", "maxtext", "weights"}
"""Results of long work, which one function each writes for all commands, and benchmarks."""
AFTER_A_MODEL = {
    "import base", "import table", "import out", "export out", "adopt model", "adopt out",
}  # fmt: skip
"""Paths that are used after a model, or by a process of its own: see `tests/interchange`."""

NO_FILES = ["nosuch", "adir", "file/x", "loop", "binary", "/proc/self/mem", "n" * 300]
EMPTY_IS_GOOD = {
    "study review settings", "simulate choice settings", "simulate fleet settings",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("paths")
    (found / "adir").mkdir()
    (found / "arun").mkdir()
    (found / "arun/config.yaml").write_text("seed: 0\n")
    (found / "empty").touch()
    (found / "binary").write_bytes(b"\xff\xfe\x00\x01" * 8)
    (found / "file").write_text("text\n")
    (found / "text.txt").write_text("some text to learn from\n" * 100)
    (found / "loop").symlink_to("loop")
    shutil.copy(ROOT / "configs/gpt/quickstart.yaml", found / CONFIG)
    shutil.copy(ROOT / "configs/mlp/digits.yaml", found)
    return found


def told(args: Sequence[str], path: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message with which a command ends."""
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [path.join(arg.split("@")) for arg in args])
    assert isinstance(result.exception, JaxdistError), (result.output, result.exc_info)
    return str(result.exception)


def check_message(message: str, path: str) -> None:
    """It names the path, says what to do, and has nothing of Python's own."""
    assert path in message
    assert "[Errno" not in message
    assert "codec" not in message
    assert any(sign in message for sign in (";", ": name", ": give", ": write", ": make")), message


@pytest.mark.parametrize("path", NO_FILES, ids=lambda path: path[:6])
@pytest.mark.parametrize("name", READ)
def test_what_cannot_be_read_is_named_with_what_to_do(
    name: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, path) == ("agent token_file", "binary"):
        return  # it may be
    check_message(told(READ[name], path, folder, monkeypatch), path)


# An agent loads a config in the process of a run, as train does, with seconds to start it.
SLOW_TO_LOAD = {"agent config": pytest.mark.full}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=SLOW_TO_LOAD.get(n, ())) for n in READ if n not in EMPTY_IS_GOOD],
)
def test_an_empty_file_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "empty" in told(READ[name], "empty", folder, monkeypatch)


@pytest.mark.parametrize("path", ["adir", "file/x", "n" * 300], ids=lambda path: path[:6])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_cannot_be_written_is_named_with_what_to_do(
    name: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, path) == ("init to", "adir"):
        return  # it writes into it
    check_message(told(WRITTEN[name], path, folder, monkeypatch), path)


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"on": "nosuch", "settings": []}'])
def test_a_record_of_a_launch_that_tells_nothing(
    record: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "launched").mkdir(exist_ok=True)
    (folder / "launched/launch.json").write_text(record)
    assert "launched" in told(READ["launch status folder"], "launched", folder, monkeypatch)


def named(commands: typer.Typer, above: str = "") -> Iterator[str]:
    """Each parameter of each command that is a path."""
    for info in commands.registered_commands:
        function: Any = info.callback
        own = f"{above}{info.name or function.__name__}"
        hints = get_type_hints(function)
        for parameter in inspect.signature(function).parameters:
            if Path in (hints[parameter], *getattr(hints[parameter], "__args__", ())):
                yield f"{own} {parameter}"
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        yield from named(group.typer_instance, f"{above}{group.name} ")


def test_no_path_of_a_command_is_left_out() -> None:
    found = {name for name in named(app) if name.split()[-1] not in ELSEWHERE}
    assert found <= READ.keys() | WRITTEN.keys() | AFTER_A_MODEL
