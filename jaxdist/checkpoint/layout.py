"""The checkpoint directory: its names, and renames that make a save or a deletion atomic.

step_00000500/            a committed checkpoint
  arrays/                 orbax's files: the small arrays in few files
  pieces/                 large arrays, cut by rows; equal files of several steps are hard links
  metadata.json           the caller's own JSON
  manifest.json           sizes and digests of all files above; written last
.tmp-*                    a checkpoint being written or deleted; of no use after a crash
.tmp-g7-step_00000500     a checkpoint being written by generation 7 of a run on several hosts
.replaced-step_00000500   the former checkpoint while its successor takes its name
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

ARRAYS = "arrays"
PIECES = "pieces"
METADATA = "metadata.json"
MANIFEST = "manifest.json"

_STAGING = ".tmp-"
_DELETED = ".tmp-deleted-"
_REPLACED = ".replaced-"
_SNAPSHOT = re.compile(r"step_(\d{8,})\.(\d+)_of_(\d+)")


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint.

    >>> step_directory(Path("run"), 500).as_posix()
    'run/step_00000500'
    """
    return directory / f"step_{step:08d}"


def staging_directory(directory: Path, step: int, generation: int | None = None) -> Path:
    """Return the directory in which a step's checkpoint is written before it is committed.

    A commit renames this directory. If its name contains a generation, only this generation can
    commit the directory. After the next generation has started, even this generation cannot commit
    it, since the next generation removes the directory first (`recover`).
    """
    of = "" if generation is None else f"g{generation}-"
    return directory / f"{_STAGING}{of}{step_directory(directory, step).name}"


def snapshot_name(step: int, process: int, count: int) -> str:
    """Return the name of the snapshot file that process number `process` of `count` writes.

    >>> snapshot_name(120, 1, 4)
    'step_00000120.1_of_4'
    """
    return f"step_{step:08d}.{process}_of_{count}"


def snapshot_of(name: str) -> tuple[int, int, int] | None:
    """Return the step, process and count in a snapshot file's name, or None for any other name.

    >>> snapshot_of("step_00000120.1_of_4"), snapshot_of("../step_00000120.1_of_4")
    ((120, 1, 4), None)
    """
    match = _SNAPSHOT.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def steps_present(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, complete or damaged, in ascending order."""
    if not directory.is_dir():
        return []
    found = (re.fullmatch(r"step_(\d{8,})", entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def fsync_directory(path: Path) -> None:
    """Write the names of a directory's entries to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(staging: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name, in place of a checkpoint of the same step.

    Raises:
      OSError: the rename failed; an existing checkpoint of the same step has its name again.
    """
    replaced = final.with_name(_REPLACED + final.name)
    os.stat(staging)  # If the directory was removed, this call fails and nothing is replaced.
    if final.exists():
        os.rename(final, replaced)
    try:
        os.rename(staging, final)
    except OSError:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        raise
    # Only after this fsync is the new name certain to survive a power failure. Only then can the
    # replaced files be deleted.
    fsync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(path: Path) -> None:
    """Delete a checkpoint, after a rename to a name that readers do not regard as a checkpoint.

    Raises:
      OSError: the rename failed; the checkpoint is unchanged.
    """
    doomed = path.with_name(_DELETED + path.name)
    # An interrupted deletion may have left files under this name, and a directory cannot be renamed
    # to a directory that is not empty.
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_older(directory: Path, generation: int) -> None:
    """Remove the directories in which earlier generations were writing checkpoints.

    This function is needed in addition to `recover`: processes of an earlier generation may
    continue to write for a while after the next generation has called `recover`.
    """
    for path in directory.glob(f"{_STAGING}*"):
        match = re.match(rf"{re.escape(_STAGING)}(?:deleted-)?g(\d+)-", path.name)
        if match is not None and int(match[1]) < generation:
            shutil.rmtree(path, ignore_errors=True)


def recover(directory: Path) -> list[str]:
    """Remove the remains of a crash from a checkpoint directory, and return their names.

    A checkpoint that was to be replaced gets its name back if the new checkpoint was not committed.
    """
    names = sorted(entry.name for entry in directory.iterdir())
    for name in names:
        if name.startswith(_REPLACED):
            original = directory / name.removeprefix(_REPLACED)
            if not original.exists():
                os.rename(directory / name, original)
    leftovers = [name for name in names if name.startswith((_STAGING, _REPLACED))]
    for name in leftovers:
        # A rename removes the directory atomically. A writer that is still alive may be about to
        # commit the directory, and must not commit it after only some of its files are deleted.
        doomed = directory / f"{_DELETED}{name.removeprefix(_STAGING)}"
        with suppress(OSError):
            if not name.startswith(_DELETED):
                os.rename(directory / name, doomed)
        for path in (directory / name, doomed):
            shutil.rmtree(path, ignore_errors=True)
    return leftovers
