"""Snapshots on a machine's own disk: the folder of each run, and its removal.

DIRECTORY/gpt-86bcf769a1b2c3d4/run     the directory and id of the run
DIRECTORY/gpt-86bcf769a1b2c3d4/step_*  see `jaxdist.checkpoint.snapshots`
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from jaxdist.checkpoint.identity import Identity, read_identity
from jaxdist.checkpoint.layout import snapshot_of, steps_present
from jaxdist.config.files import read_json
from jaxdist.errors import CheckpointError, RunError, os_errors_as

OWNER = "run"


def local_folder(directory: Path, run: Identity) -> Path:
    """Return the folder of a run's snapshots on a machine's own disk.

    The id in the folder's name distinguishes the run from all other runs, including earlier runs
    with the same path.

    >>> local_folder(Path("/ssd"), Identity("86bcf769", Path("/runs/gpt"))).name
    'gpt-86bcf769'
    """
    assert run.path is not None
    return directory / f"{run.path.name}-{run.id}"


def claim(directory: Path, run: Identity) -> Path:
    """Create and return the folder for a run's snapshots, and remove folders of other runs.

    Only the folders in `directory` whose snapshots no resume can use are removed.

    Raises:
      CheckpointError: the folder cannot be created.
    """
    folder = local_folder(directory, run)
    with os_errors_as(
        CheckpointError,
        f"snapshots cannot be kept in {folder}",
        "choose another checkpoint.local.directory",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        run.publish(folder / OWNER)
    for other in directory.iterdir():
        if other != folder and _is_needless(other):
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _is_needless(folder: Path) -> bool:
    """Return whether no resume can use the snapshots in a folder.

    The snapshots are useless if the run's directory is gone or belongs to another run, or if the
    run has a checkpoint that is at least as new. Return False while the run is active, and if it is
    unknown whether the run exists.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RunError):
        run = Identity.of(read_json(folder / OWNER))
        if run.path is None or not run.path.parent.is_dir() or (run.path / "run.lock").exists():
            return False
        found = read_identity(run.path)
        if found is None or found.id != run.id:
            return True
        parts = filter(None, (snapshot_of(path.name) for path in folder.glob("step_*")))
        newest = max((step for step, _, _ in parts), default=-1)
        return newest <= max(steps_present(run.path / "checkpoints"), default=-1)
    return False
