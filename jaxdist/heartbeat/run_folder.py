"""The folder in a machine's memory through which an agent and its processes communicate."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxdist.checkpoint.identity import Identity

FOLDER, GENERATION, FENCE = "JAXDIST_AGENT", "JAXDIST_GENERATION", "JAXDIST_FENCE"
"""The names of the environment variables with which a process finds the folder."""
MEMORY = Path("/dev/shm")
PREFIX, LOCK = "jaxdist-", ".held"
YOUNG_SECONDS = 10.0
"""The age, in seconds, below which an unlocked folder is kept, because its agent may be about to
lock the folder."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files that the agent and the processes of one generation share.

    Attributes:
      folder: the folder, which all generations of an agent share.
      generation: the number of the generation, which starts at 1.
      fence: the name that all generations of a run on several hosts share, or None for a run on a
        single host. A run on several hosts needs the name, because a process of an earlier
        generation may still be alive and must not write.
    """

    folder: Path
    generation: int
    fence: str | None = None

    @property
    def snapshots(self) -> Path:
        """The folder of the snapshots, which outlive the processes but not the machine."""
        return self.folder / "snapshots"

    @property
    def run(self) -> Path:
        """The file with the path and the id of the run, once a process has published them."""
        return self.folder / "run"

    def tell_run(self, run: Identity) -> None:
        """Publish the path and the id of the run, for the agent and for later generations."""
        run.publish(self.run)

    def known_run(self) -> Identity | None:
        """Return the path and the id of the run, or None until a process has published them."""
        try:
            return Identity.of(json.loads(self.run.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def run_directory(self) -> Path:
        """Return the run directory that a process has published.

        Raises:
          FileNotFoundError: no process has published the directory yet.
        """
        run = self.known_run()
        if run is None or run.path is None:
            raise FileNotFoundError(self.run)
        return run.path

    @property
    def done(self) -> Path:
        """The file that exists once the run has taken its last step."""
        return self.folder / f"done_{self.generation}"

    @property
    def notice(self) -> Path:
        """The file with the preemption notice that a process of the generation has received.

        The file does not exist if the request to stop came from the agent, or from a process of
        another machine.
        """
        return self.folder / f"notice_{self.generation}"

    def noticed(self) -> str | None:
        """Return the preemption notice that a process has received, or None without a notice."""
        try:
            return self.notice.read_text(encoding="utf-8") or None
        except FileNotFoundError:
            return None

    def status(self, process: int) -> Path:
        """Return the file in which a process publishes its `jaxdist.heartbeat.status`."""
        return self.folder / f"status_{self.generation}_{process}"

    def log(self, member: int) -> Path:
        """Return the file with the standard error of the agent's process number `member`."""
        return self.folder / f"log_{member}"

    def environ(self) -> dict[str, str]:
        """Return the environment variables with which a process finds its agent's folder."""
        fence = {} if self.fence is None else {FENCE: self.fence}
        return {FOLDER: str(self.folder), GENERATION: str(self.generation), **fence}


def run_folder_of(environ: Mapping[str, str]) -> RunFolder | None:
    """Return the folder that this process shares with its agent, or None without an agent.

    >>> run_folder_of({}) is None
    True
    """
    if FOLDER not in environ:
        return None
    return RunFolder(Path(environ[FOLDER]), int(environ.get(GENERATION, "1")), environ.get(FENCE))


@contextmanager
def new_folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and delete it when the context ends.

    On systems with /dev/shm, the folder is in memory. The function also deletes the folders of
    agents that were killed.
    """
    parent = MEMORY if MEMORY.is_dir() else None
    for folder in left_behind():
        shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name, held(Path(name)):
        yield Path(name)


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Lock a folder while the context, or a process with the yielded descriptor, lasts.

    Another agent does not delete a locked folder. A process that receives the descriptor at its
    start (`pass_fds`) also holds the lock.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # The agent and its processes share this lock, while `left_behind` tries to get an exclusive
        # lock.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def left_behind() -> list[Path]:
    """Return this user's folders in memory that no agent and no process of an agent locks.

    Folders that are younger than `YOUNG_SECONDS` are left out.
    """
    found = []
    for folder in MEMORY.glob(f"{PREFIX}*"):
        # An OSError skips folders of other users, folders that were deleted, and folders that are
        # locked.
        with suppress(OSError):
            descriptor = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > YOUNG_SECONDS:
                    found.append(folder)
            finally:
                os.close(descriptor)
    return found
