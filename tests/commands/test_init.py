"""`jaxdist init`: the shipped configs, also where only the package is installed."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import jaxdist
from jaxdist.commands.init import init
from jaxdist.config import read
from jaxdist.config.shipped import FOLDER, shipped
from jaxdist.errors import ConfigError

ROOT = Path(__file__).parents[2]


def written(name: str | None, folder: Path) -> tuple[set[str], str]:
    console = Console(file=io.StringIO(), width=200)
    init(name, folder, console=console)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")}
    return names, console.file.getvalue()  # type: ignore[attr-defined]


def test_the_package_takes_along_each_config_of_the_top_folder() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = Path(jaxdist.__file__).parent
    packed = {
        path.relative_to(package / "configs").as_posix()
        for pattern in settings["package-data"]["jaxdist"]
        for path in package.glob(pattern)
        if path.is_relative_to(package / "configs")
    }
    everything = {p.relative_to(ROOT / "configs").as_posix() for p in ROOT.glob("configs/**/*.*")}
    assert packed == everything == {f"{name}.yaml" for name in shipped()}


def test_all_are_written_as_they_are(tmp_path: Path) -> None:
    names, out = written(None, tmp_path / "configs")
    assert names == {f"{name}.yaml" for name in shipped()}
    for name in names:
        assert (tmp_path / "configs" / name).read_bytes() == (FOLDER / name).read_bytes()
    assert out.endswith(f"next: jaxdist train {tmp_path}/configs/gpt/quickstart.yaml\n")


@pytest.mark.parametrize("name", shipped())
def test_one_comes_with_what_it_includes(name: str, tmp_path: Path) -> None:
    names, out = written(name, tmp_path)
    assert f"{name}.yaml" in names
    assert read(tmp_path / f"{name}.yaml").values == read(shipped()[name]).values
    command = (FOLDER / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# command:")
    assert f"next: {command.strip()}".replace("configs", str(tmp_path)) in out


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("gpt", "jaxdist train '{}/a [b]/gpt/quickstart.yaml'"),
        ("gpt/70b", "jaxdist plan '{}/a [b]/gpt/70b.yaml' --on v5p:8x8x8 --write best.yaml"),
        ("mlp", "jaxdist train '{}/a [b]/mlp/digits.yaml' --devices 8"),
    ],
)
def test_the_next_command_is_the_config_s_own_and_can_be_pasted(
    name: str, command: str, tmp_path: Path
) -> None:
    _, out = written(name, tmp_path / "a [b]")
    assert out.endswith(f"next: {command.format(tmp_path)}\n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt/base.yaml", {"gpt/base.yaml"}),
        ("configs/gpt/base.yaml", {"gpt/base.yaml"}),
        ("base", {"gpt/base.yaml"}),
        ("mlp", {f"mlp/{path.name}" for path in (ROOT / "configs/mlp").iterdir()}),
        ("gpt/405b", {"gpt/405b.yaml", "gpt/70b.yaml", "gpt/7b.yaml"}),
        ("digits", {"cnn/digits.yaml", "mlp/digits.yaml"}),
    ],
)
def test_a_name_may_be_short(name: str, expected: set[str], tmp_path: Path) -> None:
    assert written(name, tmp_path)[0] == expected


def test_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="called 'gpt/bas'; did you mean 'gpt/base'"):
        written("gpt/bas", tmp_path)


def test_a_file_of_ones_own_is_kept(tmp_path: Path) -> None:
    written("gpt/quickstart", tmp_path)
    assert "is there   " in written("gpt/lamb", tmp_path)[1]
    (tmp_path / "gpt/quickstart.yaml").write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"quickstart\.yaml exists already, and differs from the"):
        written(None, tmp_path)
    assert (tmp_path / "gpt/quickstart.yaml").read_text() == "mine: 1\n"
    assert not (tmp_path / "mlp").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"base\.yaml cannot be written: .*--to"):
        written("gpt/base", tmp_path / "file")
