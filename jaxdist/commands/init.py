"""`jaxdist init`: copies of the shipped configurations, which a user can edit."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console

from jaxdist.config import read
from jaxdist.config.shipped import FOLDER, shipped, shipped_name
from jaxdist.errors import ConfigError, did_you_mean, os_errors_as

FIRST = FOLDER / "gpt/quickstart.yaml"
"""The config that is recommended to new users."""


def init(name: str | None, folder: Path, *, console: Console) -> list[Path]:
    """Write shipped configurations, and the files that they include, to a folder.

    An existing file is never replaced. An existing file with the same content is not an error.

    Args:
      name: the name of a configuration, or a kind such as `gpt` for all configurations of the kind,
        or None for all configurations.
      folder: the folder in which the copies are written.
      console: the console that prints the written paths.

    Returns:
      The paths of the requested configurations in the folder.

    Raises:
      ConfigError: no configuration has the name, or a file exists with other content or cannot be
        written.
    """
    asked = _asked(name)
    needed = sorted({file for path in asked for file in _with_includes(path)})
    # All targets are checked first, so that an existing file leaves the folder unchanged.
    for source in needed:
        target = _target(source, folder)
        if os.path.exists(target) and (
            not target.is_file() or target.read_bytes() != source.read_bytes()
        ):
            raise ConfigError(
                f"{target} exists already, and differs from the shipped {shipped_name(source)}: "
                "move the file away, or choose another folder with --to"
            )
    for source in needed:
        _write(source, _target(source, folder), console)
    first = FIRST if FIRST in asked else asked[0]
    command = _command(first, _target(first, folder))
    console.print(f"next: {command}", soft_wrap=True, markup=False)
    return [_target(source, folder) for source in asked]


def _command(source: Path, target: Path) -> str:
    """Return the command in the first line of a shipped config, with the path of its copy."""
    named = source.read_text().splitlines()[0].removeprefix("# command:").strip()
    return named.replace(f"configs/{shipped_name(source)}.yaml", shlex.quote(str(target)))


def _asked(name: str | None) -> list[Path]:
    known = shipped()
    if name is None:
        return list(known.values())
    wanted = name.removesuffix(".yaml").removeprefix("configs/").strip("/")
    found = [
        path
        for own, path in known.items()
        if wanted in (own, Path(own).name, Path(own).parent.name)
    ]
    if not found:
        raise ConfigError(f"no shipped config is called {name!r}; {did_you_mean(wanted, known)}")
    return found


def _with_includes(path: Path) -> set[Path]:
    return {Path(os.path.normpath(file)) for file in read(path).files}


def _target(source: Path, folder: Path) -> Path:
    return folder / source.relative_to(FOLDER)


def _write(source: Path, target: Path, console: Console) -> None:
    if os.path.exists(target):
        console.print(f"is there   {target}", soft_wrap=True, markup=False)
        return
    with os_errors_as(
        ConfigError, f"{target} cannot be written", "choose another folder with --to"
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    console.print(f"written    {target}", soft_wrap=True, markup=False)
