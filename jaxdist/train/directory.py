"""The run directory: what it holds, and which one a run takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from jaxdist.errors import RunError
from jaxdist.runtime import environment
from jaxdist.train.lock import FILE_NAME, HeldError, RunLock

PACKAGES = (
    "python",
    "jaxdist",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
)
"""What decides a run's numbers."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run: resolved config, versions, metrics, checkpoints, loss curve."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, which `jaxdist train` can run again."""
        return self.path / "config.yaml"

    @property
    def versions(self) -> Path:
        """Versions of Python and of the packages that matter."""
        return self.path / "versions.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def profile(self) -> Path:
        """Traces of steps, where a run was asked for them."""
        return self.path / "profile"

    @property
    def lock(self) -> Path:
        """Who is writing here; gone when nobody is."""
        return self.path / FILE_NAME

    @property
    def occupied(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists()


def take(
    base: Path, *, named: bool, resume: bool, say: Callable[[str], None]
) -> tuple[RunDirectory, RunLock]:
    """The directory that a run takes, locked: `base`, or `base-2`, `base-3` ... where runs stand.

    With `resume`, the newest that has begun (`base` when none has), so that a relaunched job finds
    its own; without, the first that is free, so that nothing is ever overwritten.

    Args:
      named: the user named the directory: another run that is at it is no reason for another name.
      say: called with a line about a run that is met.

    Raises:
      RunError: a live run holds the directory, and `named` or `resume` is set; or it cannot be
        written.
    """
    if resume:
        return _take_newest(base, say)
    for directory in _numbered(base):
        if directory.occupied and not directory.lock.exists():
            continue
        try:
            lock = RunLock(directory.path, say=say)
        except HeldError as error:
            if named:
                raise
            say(f"{error.who}: this run takes the next name")
            continue
        if not directory.occupied:
            return directory, lock
        lock.release()
    raise AssertionError("unreachable: the names do not end")


def _take_newest(base: Path, say: Callable[[str], None]) -> tuple[RunDirectory, RunLock]:
    """Passes over what holds a lock alone: a run that died before it wrote anything."""
    begun = list(takewhile(lambda d: d.occupied or d.lock.exists(), _numbered(base)))
    for directory in reversed(begun):
        lock = RunLock(directory.path, say=say)
        if directory.occupied:
            return directory, lock
        lock.release()
    return RunDirectory(base), RunLock(base, say=say)


def _numbered(base: Path) -> Iterator[RunDirectory]:
    yield RunDirectory(base)
    yield from (RunDirectory(base.with_name(f"{base.name}-{number}")) for number in count(2))


def prepare(directory: RunDirectory, resolved_config: str) -> None:
    """Create the directory and write the resolved config and versions, atomically.

    Raises:
      RunError: it cannot be written.
    """
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        versions = environment.versions(PACKAGES)
        _write(directory.versions, json.dumps(versions, indent=2) + "\n")
        _write(directory.config, resolved_config)
    except OSError as error:
        raise RunError(
            f"run directory {directory.path} cannot be written: {error.strerror or error}; "
            "choose another with run.directory=PATH"
        ) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
