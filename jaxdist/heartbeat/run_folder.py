"""Where an agent and the processes of its run meet: a folder in this machine's memory."""

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
"""Variables that tell a process of it."""
MEMORY = Path("/dev/shm")
PREFIX, LOCK = "jaxdist-", ".held"
YOUNG_SECONDS = 10.0
"""A folder may be held by nobody while it is made."""


@dataclass(frozen=True)
class RunFolder:
    """The folder, as the processes of one generation see it.

    Attributes:
      generation: from 1; each has new processes.
      fence: where several hosts take part, what their generations have in common: one of an
        older generation may still live, and must not write. None: there is no such.
    """

    folder: Path
    generation: int
    fence: str | None = None

    @property
    def snapshots(self) -> Path:
        """Copies of the state, as checkpoints are; they outlive processes, and not the machine."""
        return self.folder / "snapshots"

    @property
    def run(self) -> Path:
        """A file with the path and the id of the run, when they are known."""
        return self.folder / "run"

    def tell_run(self, run: Identity) -> None:
        """Write down which run this is, for the agent and for later generations."""
        assert run.path is not None
        staging = self.folder / f".run_{os.getpid()}"
        staging.write_text(json.dumps({**run.plain, "path": str(run.path.absolute())}))
        staging.rename(self.run)

    def known_run(self) -> Identity | None:
        """Return which run this is; None while no process has told it."""
        try:
            return Identity.of(json.loads(self.run.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def run_directory(self) -> Path:
        """Return the run directory.

        Raises:
          FileNotFoundError: no process has told it yet.
        """
        run = self.known_run()
        if run is None or run.path is None:
            raise FileNotFoundError(self.run)
        return run.path

    @property
    def done(self) -> Path:
        """A file that is there when the generation has come to the end of the run, and was not told
        to stop before."""
        return self.folder / f"done_{self.generation}"

    @property
    def notice(self) -> Path:
        """A file with what has told a process of the generation that its machine is to stop; not
        there where it was told to by the agent, or by other machines' processes."""
        return self.folder / f"notice_{self.generation}"

    def noticed(self) -> str | None:
        """What has told a process that its machine is to stop, if something did."""
        try:
            return self.notice.read_text(encoding="utf-8") or None
        except FileNotFoundError:
            return None

    def status(self, process: int) -> Path:
        """What a process says of itself: see `jaxdist.heartbeat.status`."""
        return self.folder / f"status_{self.generation}_{process}"

    def log(self, member: int) -> Path:
        """The standard error of a member, by its number among all that were started."""
        return self.folder / f"log_{member}"

    def environ(self) -> dict[str, str]:
        """What a process finds it by."""
        fence = {} if self.fence is None else {FENCE: self.fence}
        return {FOLDER: str(self.folder), GENERATION: str(self.generation), **fence}


def run_folder_of(environ: Mapping[str, str]) -> RunFolder | None:
    """The place of a process that an agent has started; None of any other.

    >>> place_of({}) is None
    True
    """
    if FOLDER not in environ:
        return None
    return RunFolder(Path(environ[FOLDER]), int(environ.get(GENERATION, "1")), environ.get(FENCE))


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that nobody else can enter, in memory where the system has such; gone at the end.

    Those go too that agents have left behind that were killed.
    """
    parent = MEMORY if MEMORY.is_dir() else None
    for folder in left_behind():
        shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name, held(Path(name)):
        yield Path(name)


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Somebody is there for as long as a process has this descriptor open.

    A process that is begun meanwhile with it (`pass_fds`) holds the folder too.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def left_behind() -> list[Path]:
    """Folders of this user in memory that neither an agent nor a process of it holds."""
    found = []
    for folder in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, just made or gone, or held
            descriptor = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > YOUNG_SECONDS:
                    found.append(folder)
            finally:
                os.close(descriptor)
    return found
