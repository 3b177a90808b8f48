"""Every command has --json, and writes the keys that docs/guides/scripts.md lists."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from documents import ROOT
from typer.testing import CliRunner

from jaxdist.cli import app

STUBS = ("sbatch", "scontrol", "scancel", "tail")
"""The programs of Slurm that a launch calls; each only answers."""

PAGE = (ROOT / "docs/guides/scripts.md").read_text()
SIZES = ["--stages", "2", "--microbatches", "4"]
GIVEN = {
    "init": ["init", "gpt/quickstart", "--to", "configs"],
    "eject": ["eject", str(ROOT / "configs/mlp/digits.yaml")],
    "config schema": ["config", "schema"],
    "data tokenize": ["data", "tokenize", "out.json", "text.txt", "--vocab-size", "300"],
    "pipeline show": ["pipeline", "show", "1f1b", *SIZES],
    "pipeline check": ["pipeline", "check", "own.csv"],
    "pipeline compare": ["pipeline", "compare", *SIZES],
    "launch job": ["launch", "digits.yaml", "--dry-run"],
    "launch explain": ["launch", "explain"],
    "launch status": ["launch", "status", "launched"],
    "launch logs": ["launch", "logs", "launched"],
    "launch stop": ["launch", "stop", "launched"],
}
"""Commands that take no seconds; the others' JSON is tested beside what they do."""


def commands(of: typer.Typer, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command's words, and its function."""
    for info in of.registered_commands:
        function: Any = info.callback
        yield f"{above}{info.name or function.__name__}", function
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{above}{group.name} ")


FUNCTIONS = dict(commands(app))


def documented(command: str) -> list[str]:
    """The keys in the row of a command."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    found = [keys for names, keys in rows if f"`{command}`" in names]
    assert len(found) == 1, f"{command} has {len(found)} rows in docs/guides/scripts.md"
    return re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", found[0]))


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_command_has_json_and_a_row_of_its_keys(command: str) -> None:
    function = FUNCTIONS[command]
    annotations = [str(one.annotation) for one in inspect.signature(function).parameters.values()]
    assert [text for text in annotations if "JsonFile" in text or "--json" in text], (
        f"{command} has no --json: add json_file: shared.JsonFile, and shared.write_result"
    )
    documented(command)


@pytest.mark.parametrize("command", GIVEN)
def test_the_keys_are_those_of_the_page(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Path("text.txt").write_text("some text to learn from\n" * 100)
    Path("digits.yaml").write_text((ROOT / "configs/mlp/digits.yaml").read_text())
    Path("own.csv").write_text("0F0,0B0\n")
    Path("launched").mkdir()
    record = {"on": "slurm", "settings": [], "identity": "7"}
    Path("launched/launch.json").write_text(json.dumps(record))
    for program in STUBS:
        Path(program).write_text("#!/bin/sh\necho answered\n")
        Path(program).chmod(0o755)
    result = CliRunner().invoke(app, [*GIVEN[command], "--json", "a.json"])
    assert result.exit_code == 0, (result.output, result.exc_info)
    found = json.loads(Path("a.json").read_text())
    assert found.pop("schema") == 1
    assert sorted(found) == sorted(documented(command))
    if command == "launch status":
        assert (found["output"], found["exit_code"]) == ("answered\n", 0)
        assert "answered" in result.output
