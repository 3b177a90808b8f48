"""The run directory: the paths of its files, and the choice of a directory for a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from jaxdist.checkpoint.identity import (
    CONFIG,
    Identity,
    check_identity,
    family,
    given_identity,
    has_begun,
    new_id,
    read_identity,
    run_directories,
    with_id,
    write_identity,
)
from jaxdist.checkpoint.layout import steps_present
from jaxdist.config.files import replace_text
from jaxdist.errors import RunError
from jaxdist.run.lock import FILE_NAME, HeldError, RunLock, writing_to
from jaxdist.runtime import environment

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
"""The packages whose versions may change a run's numbers."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run's files: resolved config, versions, metrics, checkpoints, loss curve.

    Attributes:
      identity: the identity of the run that writes to this directory, or None in a process that
        only reads.
    """

    path: Path
    identity: Identity | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration, which `jaxdist train` can run again."""
        return self.path / CONFIG

    @property
    def versions(self) -> Path:
        """The file with the versions of Python and of the packages in `PACKAGES`."""
        return self.path / "versions.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        """The file with the picture of the loss curve."""
        return self.path / "loss.png"

    @property
    def profile(self) -> Path:
        """The directory of the traces of steps, which exists only if traces were requested."""
        return self.path / "profile"

    @property
    def proof(self) -> Path:
        """The certificate of the run's plan, which exists only if the run began with `--proved`."""
        return self.path / "prove.json"

    @property
    def lock(self) -> Path:
        """The lock file, which names the process that writes to this directory."""
        return self.path / FILE_NAME

    @property
    def occupied(self) -> bool:
        """Whether a run has begun in this directory."""
        return has_begun(self.path)


class LockedDirectory(NamedTuple):
    """A run directory and the lock on it.

    Attributes:
      goes_on: whether the run is resumed. A resumed run continues from its saved state, or begins
        at step 0 if no state was saved.
    """

    directory: RunDirectory
    lock: RunLock
    goes_on: bool


def take_directory(
    base: Path,
    *,
    named: bool,
    resume: bool,
    say: Callable[[str], None],
    exact: bool = False,
    run: Identity | None = None,
) -> LockedDirectory:
    """Take and lock the directory of a run.

    A new run takes the first free name of `base`, `base-2`, `base-3` ..., so that nothing is
    overwritten. With `resume`, the run that has begun under one of these names continues. If
    several runs have begun, the choice is ambiguous, and an error is raised. A process that already
    knows its run passes `run`; all other runs under these names are then ignored.

    Args:
      named: whether the user named the directory. If true, a live run in the directory is an error,
        instead of a reason to try the next name.
      resume: whether to continue the run that has begun; if no run has begun, a new run begins.
      say: the function that is called with a line about each other run that is found.
      exact: whether `resume` means only `base` itself, and not the numbered names.
      run: the identity of the run to take. If the identity has no path, because the run has not
        begun, the function takes the directory that has the run's id. If there is no such
        directory, the function chooses a directory as for a new run, and the directory receives the
        id.

    Raises:
      RunError: a live run holds the directory, and `named`, `resume` or `run` is set; several runs
        could be resumed; the directory belongs to another run; or the directory cannot be written.
    """
    if run is not None:
        path = run.path or with_id(base, run.id)
        if path is not None:
            return _take_this(path, run, say)
    if resume:
        path = _find(base, exact=exact, say=say)
        if path is not None:
            return _take_this(path, None, say)
    identity = Identity(new_id() if run is None else run.id, asked=base.name)
    for directory in _numbered(base):
        if directory.occupied and not directory.lock.exists():
            continue
        try:
            lock = RunLock(directory.path, say=say)
        except HeldError as error:
            if named or resume:
                raise
            say(f"{error.who}: this run uses the next free name")
            continue
        if not directory.occupied:
            if named and not resume and directory.path != base:
                say(
                    f"{base} holds an earlier run, which --resume continues; "
                    f"this run uses {directory.path}"
                )
            return LockedDirectory(replace(directory, identity=identity), lock, goes_on=resume)
        # Another run began in this directory between the check and the lock, and has ended. The
        # next directory is therefore tried.
        lock.release()
    raise AssertionError("unreachable: the names do not end")


def existing_run(path: Path) -> RunDirectory:
    """Return the directory of a run that has begun.

    Raises:
      RunError: there is no run in the directory.
    """
    directory = RunDirectory(path)
    if not directory.occupied:
        raise RunError(
            f"{path} is not a run directory, since it has no {directory.config.name}: give the "
            "directory that `jaxdist train` printed after the word run"
        )
    return directory


def directory_identity(directory: RunDirectory) -> Identity:
    """Return the identity of the run that has taken a directory, with the directory's path."""
    assert directory.identity is not None, "only a directory that was taken has an identity"
    return replace(directory.identity, path=directory.path)


def _take_this(path: Path, run: Identity | None, say: Callable[[str], None]) -> LockedDirectory:
    """Lock the directory of a run that is resumed, or that ended before it wrote anything."""
    directory = RunDirectory(path)
    lock = RunLock(path, say=say)
    try:
        with writing_to(path):
            found = given_identity(path) if run is None else run
            if directory.occupied or read_identity(path) is not None:
                check_identity(path, found.id)
    except BaseException:
        lock.release()
        raise
    return LockedDirectory(replace(directory, identity=found), lock, goes_on=True)


def _find(base: Path, *, exact: bool, say: Callable[[str], None]) -> Path | None:
    """Find the directory of the run that `--resume` means, or return None if no run has begun.

    Args:
      exact: whether only `base` may be resumed, and not a numbered name.
      say: the function that is called with a line if other runs have begun under the numbered
        names.

    Raises:
      RunError: several runs have begun, so that the choice is ambiguous; or a live run holds a
        directory to which it has not yet written its config.
    """
    begun = run_directories(base)
    others = "; ".join(_described(path) for path in begun if path != base)
    if exact and RunDirectory(base).occupied:
        if others:
            say(f"resume {base}, which run.directory names; other runs with this name: {others}")
        return base
    if exact and others:
        raise RunError(
            f"--resume: no run has begun in {base}, but there are runs with that name and a "
            f"number: {others}. Choose one with run.directory=PATH, or start a new run without "
            "--resume"
        )
    if len(begun) > 1:
        listed = "; ".join(map(_described, begun))
        raise RunError(
            f"--resume: {len(begun)} runs have begun under the name {base}, so --resume cannot "
            f"decide which run to continue: {listed}. Choose one with run.directory=PATH on the "
            "command line"
        )
    for directory in map(RunDirectory, family(base)):
        # A run that is about to write its first file holds its lock, and RunLock raises an error.
        # The lock of a run that ended before it wrote its first file is removed here.
        if directory.lock.exists() and not directory.occupied:
            RunLock(directory.path, say=say).release()
    return begun[0] if begun else None


def _described(path: Path) -> str:
    """Return the path, last step and start time of a run as text, for a user who must choose.

    >>> _described(Path("/nowhere/gpt"))
    '/nowhere/gpt (no checkpoint)'
    """
    directory = RunDirectory(path)
    steps = steps_present(directory.checkpoints)
    found = [f"step {max(steps)}" if steps else "no checkpoint"]
    identity = read_identity(path)
    if identity is not None and identity.begun:
        found.append(f"begun {identity.begun}")
    elif directory.occupied:
        written = time.localtime(directory.config.stat().st_mtime)
        found.append(f"written {time.strftime('%Y-%m-%d %H:%M:%S %z', written)}")
    return f"{path} ({', '.join(found)})"


def _numbered(base: Path) -> Iterator[RunDirectory]:
    yield RunDirectory(base)
    yield from (RunDirectory(base.with_name(f"{base.name}-{number}")) for number in count(2))


def prepare_directory(directory: RunDirectory, resolved_config: str) -> None:
    """Create the directory and write the identity, the versions and the resolved config.

    Each file is written atomically. The config is written last, so that a directory with a config
    always has an identity.

    Raises:
      RunError: the directory cannot be written, or belongs to another run.
    """
    with writing_to(directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
        identity = directory.identity or read_identity(directory.path)
        identity = identity or Identity(new_id(), asked=directory.path.name)
        write_identity(directory.path, identity)
        versions = environment.versions(PACKAGES)
        replace_text(directory.versions, json.dumps(versions, indent=2) + "\n")
        replace_text(directory.config, resolved_config)
