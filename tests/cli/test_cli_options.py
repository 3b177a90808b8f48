"""What stands before a command: the version, and completion in a shell."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jaxdist.cli import app
from jaxdist.errors import RunError

RUN = CliRunner()


def test_the_version_names_what_decides_a_run():
    result = RUN.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == (
        f"jaxdist {version('jaxdist')}, jax {version('jax')}, python {platform.python_version()}\n"
    )


def test_the_help_is_that_of_the_program():
    result = RUN.invoke(app, ["--help"])
    assert "Train any JAX model on any mesh by changing a config." in result.output
    assert "--install-completion" in result.output


def test_every_parameter_has_a_help_which_its_docstring_names():
    def without(command, above: str) -> list[str]:
        below = getattr(command, "commands", {}).items()
        return [
            *(f"{above} {param.name}" for param in command.params if not param.help),
            *(f"{above}: {command.help}" for _ in [0] if "Args:" in command.help),
            *(found for name, one in below for found in without(one, f"{above} {name}")),
        ]

    assert not without(typer.main.get_command(app), "jaxdist")


def test_paragraphs_of_help_are_wrapped_for_the_terminal():
    """A line break of the source would end a line in the middle of a sentence."""
    (paragraph,) = [
        paragraph
        for paragraph in typer.main.get_command(app).commands["parity"].help.split("\n\n")
        if paragraph.startswith("The plans vary")
    ]
    assert "\n" not in paragraph
    assert "remat, a split sequence, pipeline schedules" in paragraph


@pytest.mark.parametrize("switch", ["--no-resume", "--no-elastic"])
def test_a_switch_that_is_off_has_no_opposite(switch: str):
    result = RUN.invoke(app, ["train", "config.yaml", switch])
    assert result.exit_code == 2
    assert f"No such option: {switch}" in result.output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("jaxdist tr", "train"),
        ("jaxdist train --resu", "--resume"),
        ("jaxdist config s", "show\nschema"),
        ("jaxdist launch st", "status\nstop"),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str):
    environ = {
        "_JAXDIST_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    result = RUN.invoke(app, [], prog_name="jaxdist", env=environ)
    assert result.output.strip() == offered


def test_what_is_no_run_directory_is_told_which_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    for given in ("runs", "runs/c"):
        for command in (["eval"], ["generate", "--prompt", "x"], ["replay"]):
            result = RUN.invoke(app, [command[0], given, *command[1:]])
            assert isinstance(result.exception, RunError)
            assert str(result.exception) == (
                f"{given} is not a run directory, since it has no config.yaml: give the directory "
                "that `jaxdist train` printed after the word run; there are runs/a, runs/b"
            )
