"""The checkpoint directory: names, and the renames that make a save or a deletion all or nothing.

step_00000500/            a committed checkpoint
  arrays/                 what orbax wrote
  metadata.json           the caller's own JSON
  manifest.json           sizes and digests of all of the above; written last
.tmp-*                    being written or deleted; worthless after a crash
.replaced-step_00000500   the former checkpoint while a new one of the same step takes its name
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ARRAYS = "arrays"
METADATA = "metadata.json"
MANIFEST = "manifest.json"

_STAGING = ".tmp-"
_DELETED = ".tmp-deleted-"
_REPLACED = ".replaced-"


def step_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step stands.

    >>> step_directory(Path("run"), 500).as_posix()
    'run/step_00000500'
    """
    return directory / f"step_{step:08d}"


def staging_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is committed."""
    return directory / f"{_STAGING}{step_directory(directory, step).name}"


def steps_present(directory: Path) -> list[int]:
    """The steps that have a directory, whole or damaged, in ascending order."""
    if not directory.is_dir():
        return []
    found = (re.fullmatch(r"step_(\d{8,})", entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(staging: Path, final: Path) -> None:
    """Give a finished checkpoint its name; one that held the name is put back if this fails.

    Raises:
      OSError: the rename failed; `recover` brings the former state back.
    """
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    fsync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(path: Path) -> None:
    """Delete a checkpoint; from the first moment on it no longer looks like one.

    Raises:
      OSError: the rename failed, and the checkpoint is untouched.
    """
    doomed = path.with_name(_DELETED + path.name)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def recover(directory: Path) -> list[str]:
    """Clear what a crash left behind, and return the names dealt with.

    A replaced checkpoint whose successor never took its name gets the name back.
    """
    names = sorted(entry.name for entry in directory.iterdir())
    for name in names:
        if name.startswith(_REPLACED):
            original = directory / name.removeprefix(_REPLACED)
            if not original.exists():
                os.rename(directory / name, original)
    leftovers = [name for name in names if name.startswith((_STAGING, _REPLACED))]
    for name in leftovers:
        shutil.rmtree(directory / name, ignore_errors=True)
    return leftovers
