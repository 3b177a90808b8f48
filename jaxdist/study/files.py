"""Functions for the settings of a study on the command line, and for its output files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from jaxdist.config.load import read
from jaxdist.config.schema import Config, validate
from jaxdist.errors import RunError, os_errors_as
from jaxdist.metrics.report import write_json
from jaxdist.types import JsonObject

C = TypeVar("C", bound=Config)
_REMEDY = "choose another path"


def read_settings(settings: Sequence[str], kind: type[C]) -> C:
    """Return the config that settings from the command line describe.

    Args:
      settings: an optional path of a YAML file, followed by texts `key=value`.
      kind: the class of the config.

    Raises:
      ConfigError: a setting does not exist, or has an invalid value.
    """
    path = Path(settings[0]) if settings and "=" not in settings[0] else None
    return validate(read(path, settings[path is not None :]), kind)


def journal_path(path: Path, name: str, json_file: Path | None, plot: Path | None) -> Path:
    """Return the path of the file that stores a study's runs.

    The file is next to the output, or in runs/ if the study writes no output.

    Args:
      path: the path of the config.
      name: the name of the study.
      json_file: the file for the results, or None if none is written.
      plot: the directory for the plot, or None if none is drawn.
    """
    if json_file is not None:
        return json_file.with_suffix(".runs.jsonl")
    return (plot or Path("runs")) / f"{path.stem}-{name}.runs.jsonl"


def check_writable(plot: Path | None, json_file: Path | None) -> None:
    """Check that the output can be written, before the first run.

    Args:
      plot, json_file: the directory for pictures and the file for JSON; None means that this output
        is not written.

    Raises:
      RunError: a directory of the output cannot be written.
    """
    for folder in filter(None, (plot, json_file and json_file.parent)):
        with os_errors_as(RunError, f"cannot write the study to {folder}", _REMEDY):
            folder.mkdir(parents=True, exist_ok=True)
            # A file is created, since permission bits do not show a read-only disk, and do not
            # apply to root.
            tempfile.TemporaryFile(dir=folder).close()


def write_study(path: Path | None, found: JsonObject) -> None:
    """Write the results of a study to a JSON file, or nothing if `path` is None.

    Raises:
      RunError: the file cannot be written.
    """
    write_json(path, found, what="study", remedy=_REMEDY, indent=1)
