"""The identity of a run, which distinguishes the run from other runs: an id in its directory.

RUN/run.json    {"id": "9f86d081884c7d65", "begun": "2026-01-31 12:00:00 +0000", "asked": "gpt"}

A path does not identify a run: the directory can be deleted and a new run can start there, and a
second run of a config takes a numbered name next to the name of the first. Each process that
continues a run (a later generation, a worker, a server) or uses its snapshots therefore receives
the id with the path, and refuses a directory with another id.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from jaxdist.config.files import read_json, replace_text
from jaxdist.errors import RunError
from jaxdist.types import JsonObject

FILE_NAME, CONFIG = "run.json", "config.yaml"


@dataclass(frozen=True)
class Identity:
    """The identity of a run: its id, its directory and its origin.

    Attributes:
      id: a random id, which is drawn before the run starts or when it starts.
      path: the directory of the run, or None while it is unknown.
      begun: the local time of the run's start, as text for people, or an empty string if the time
        is unknown.
      asked: the name of the directory that was requested, to which the run's directory may add a
        number. None means that the run began before jaxdist had ids.
    """

    id: str
    path: Path | None = None
    begun: str = ""
    asked: str | None = None

    @property
    def plain(self) -> JsonObject:
        """The id and the path as plain data, for another process."""
        return {"id": self.id, "path": None if self.path is None else str(self.path)}

    def publish(self, file: Path) -> None:
        """Write the id and the absolute path as JSON, atomically; `of` takes the parsed content.

        Raises:
          OSError: the file cannot be written.
        """
        assert self.path is not None
        replace_text(file, json.dumps({**self.plain, "path": str(self.path.absolute())}))

    @classmethod
    def of(cls, plain: JsonObject) -> Self:
        """Return the identity with the id and the path that the property `plain` returned.

        >>> Identity.of(Identity("a1", Path("/runs/gpt")).plain).path
        PosixPath('/runs/gpt')
        """
        return cls(plain["id"], None if plain["path"] is None else Path(plain["path"]))


def new_id() -> str:
    """Return a random id of 64 bits, which no other run has."""
    return token_hex(8)


def read_identity(run: Path) -> Identity | None:
    """Return the identity in a run directory, or None if the directory or its identity is missing.

    Raises:
      RunError: the file is damaged.
    """
    path = run / FILE_NAME
    try:
        told: Any = read_json(path)
        found = told["id"], told.get("begun", ""), told.get("asked")
        if not (isinstance(found[0], str) and found[0] and isinstance(found[1], str)):
            raise ValueError("the value of id is not text")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(_damaged(path, error.strerror or error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            _damaged(path, f"the file does not contain the identity of a run ({error})")
        ) from error
    return Identity(found[0], run, found[1], found[2])


def _damaged(path: Path, why: object) -> str:
    return (
        f"{path} cannot be used: {why}; restore the file from a copy, or remove the file, after "
        "which the next --resume gives the run a new id"
    )


def write_identity(run: Path, identity: Identity) -> None:
    """Write the identity of a run directory atomically, if the directory lacks this id.

    Raises:
      RunError: the directory belongs to another run, or its identity is damaged.
      OSError: the identity cannot be written.
    """
    if read_identity(run) is not None:
        check_identity(run, identity.id)
        return
    begun = identity.begun or time.strftime("%Y-%m-%d %H:%M:%S %z")
    text = json.dumps({"id": identity.id, "begun": begun, "asked": identity.asked})
    replace_text(run / FILE_NAME, text + "\n")


def given_identity(run: Path) -> Identity:
    """Return the identity of a started run; give the run an id if it has none.

    A run that began before jaxdist had ids has no identity.

    Raises:
      RunError: see `read_identity`.
      OSError: see `write_identity`.
    """
    found = read_identity(run)
    if found is None:
        found = replace(Identity(new_id()), begun="before runs had an id")
        write_identity(run, found)
    return replace(found, path=run)


def check_identity(run: Path, wanted: str) -> None:
    """Check that a directory belongs to the run with the id `wanted`.

    Raises:
      RunError: the directory has another id, or no id.
    """
    found = read_identity(run)
    if found is None or found.id != wanted:
        has = "has no id" if found is None else f"is run {found.id}, begun {found.begun}"
        raise RunError(
            f"run directory {run} {has}, but this process continues run {wanted}: the directory "
            "was removed, moved or replaced. Put the directory back, or choose another run with "
            "--resume run.directory=PATH. If agents started this run without run.directory, also "
            "choose another --rendezvous"
        )


def base_of(directory: Path | None, config: Path) -> Path:
    """Return the path of the run directory that a command requests.

    If this directory is taken, a new run gets a name with a number instead, such as NAME-2.

    Args:
      directory: the directory in the config, or None if the name of the config's file decides.
      config: the path of the config's file.

    >>> base_of(None, Path("configs/gpt.yaml"))
    PosixPath('runs/gpt')
    >>> base_of(Path("."), Path("gpt.yaml")).name == Path.cwd().name
    True
    """
    base = directory or Path("runs") / config.stem
    return base.resolve() if base.name in ("", "..") else base


def has_begun(run: Path) -> bool:
    """Return whether a run has started in a directory, which means that its config exists."""
    # `Path.exists` would raise an OSError for a name that is too long.
    return os.path.exists(run / CONFIG)


def run_directories(base: Path) -> list[Path]:
    """Return the directories of all started runs for which `base` was the requested directory.

    For `gpt` the result includes `gpt-2`, unless the identity in `gpt-2` states that this name
    itself was requested.

    Raises:
      RunError: see `read_identity`.
    """
    found = []
    for path in filter(has_begun, family(base)):
        identity = read_identity(path)
        if identity is None or identity.asked in (None, base.name):
            found.append(path)
    return found


def with_id(base: Path, wanted: str) -> Path | None:
    """Return the directory with an id among `base`, `base-2`, ..., or None if none has the id.

    A caller needs this function if a process has taken a directory, and has ended before it could
    report the directory.

    Raises:
      RunError: see `read_identity`.
    """
    for path in family(base):
        identity = read_identity(path)
        if identity is not None and identity.id == wanted:
            return path
    return None


def family(base: Path) -> list[Path]:
    """Return the existing directories among `base`, `base-2`, `base-3`, ..."""
    start = len(base.name) + 1
    numbers = sorted(
        int(path.name[start:])
        for path in base.parent.glob(f"{glob.escape(base.name)}-*")
        if re.fullmatch("[2-9]|[1-9][0-9]+", path.name[start:], re.ASCII)
    )
    named = (base.with_name(f"{base.name}-{number}") for number in numbers)
    return [path for path in (base, *named) if os.path.exists(path)]
