"""A rendezvous in a directory that all hosts share: every change is a rename.

    FOLDER/keeper/TOKEN       an empty file, whose name is the token
    FOLDER/KIND/NAME.json     a value
    FOLDER/secret             the secret of hosts without a token file, readable by its owner only

A swap renames the token's file. If several hosts rename the same file, one host succeeds, and the
other hosts get an error because the file no longer exists. The file server decides which host
succeeds, so that the cache of a client cannot interfere.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from secrets import token_hex

from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous, RendezvousError, Token
from jaxdist.errors import os_errors_as
from jaxdist.types import Json

KEEPER, SECRET = "keeper", "secret"
PROBES = 40
_TRIES, _PAUSE_SECONDS = 50, 0.01


class FolderRendezvous(Rendezvous):
    """A `jaxdist.elastic.hosts.rendezvous.contract.Rendezvous` in a folder.

    Args:
      folder: the folder, which is created if it does not exist.

    Raises:
      RendezvousError: the folder cannot be written, or renames in the folder are not atomic.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.address = str(folder)
        with self._told():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.folder / f".probe-{token_hex(4)}"
            probe.mkdir()
        try:
            with self._told():
                problem = find_problem(probe)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
        if problem:
            raise RendezvousError(
                f"the rendezvous {self.address} has no atomic rename ({problem}): choose a "
                "directory of a POSIX file system, such as NFS or Lustre, or redis://HOST:PORT"
            )
        with self._told():
            self._begin()

    def _begin(self) -> None:
        """Create the first token, unless another host has created it."""
        if (self.folder / KEEPER).is_dir():
            return
        staging = self.folder / f".new-{token_hex(4)}"
        staging.mkdir()
        (staging / str(Token(token_hex(16)))).touch()
        # Only the first rename succeeds, since a directory cannot replace a directory that has
        # content.
        try:
            os.rename(staging, self.folder / KEEPER)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def token(self) -> str:
        """Return the current token of the rendezvous."""
        found: list[str] = []
        for _ in range(_TRIES):
            with self._told():
                found = os.listdir(self.folder / KEEPER)
            if len(found) == 1:  # During a rename, a listing may have both names, or neither.
                return found[0]
            time.sleep(_PAUSE_SECONDS)
        raise RendezvousError(
            f"{self.folder / KEEPER} contains {len(found)} files instead of 1, so another program "
            "writes there; stop all agents and choose an empty directory"
        )

    def secret(self) -> bytes:
        """Return the content of a file that only its owner can read, even in a shared folder.

        The token cannot be the secret, since the token is a file name, which every user who may
        list the folder can see. The file is created if it does not exist.

        Raises:
          RendezvousError: other users can read the file, or its content is incomplete.
        """
        path, own, found = self.folder / SECRET, token_hex(32), b""
        with self._told():
            # If another host has created the file first, its content is read below.
            with suppress(FileExistsError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(own)
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise RendezvousError(
                    f"{path} can be read by other users (mode {mode:o}), who could use the token "
                    f"to fetch the model: run chmod 600 {path}, or start all agents with "
                    "--token-file"
                )
            # If another host has created the file but not yet written its content, the read is
            # repeated.
            for _ in range(_TRIES):
                found = path.read_bytes()
                if len(found) == len(own):
                    return found
                time.sleep(_PAUSE_SECONDS)
        raise RendezvousError(
            f"{path} has {len(found)} bytes instead of {len(own)}: remove the file, or start all "
            "agents with --token-file"
        )

    def compare_and_swap(self, seen: str, new: str) -> bool:
        """Swap the token by a rename of its file.

        Return whether the swap succeeded.

        Args:
          seen: the token that the caller expects.
          new: the token that replaces it.
        """
        with self._told():
            try:
                os.rename(self.folder / KEEPER / seen, self.folder / KEEPER / new)
            except FileNotFoundError:
                # A missing directory means that the rendezvous is gone, and not that another host
                # swapped the token first.
                if not (self.folder / KEEPER).is_dir():
                    raise
                return False
        return True

    def put(self, name: str, value: Json) -> None:
        """Write a value to a temporary file, and rename the file to its final name."""
        path = self._path(name)
        staging = path.with_name(f".{path.name}-{token_hex(4)}")
        with self._told():
            path.parent.mkdir(exist_ok=True)
            staging.write_text(json.dumps(value), encoding="utf-8")
            os.replace(staging, path)

    def get(self, name: str) -> Json:
        """Return the value with the given name, or None if there is no such value."""
        with self._told():
            try:
                return json.loads(self._path(name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return None

    def names(self, kind: str) -> list[str]:
        """Return the names of all values of a kind."""
        with self._told():
            try:
                found = os.listdir(self.folder / kind)
            except FileNotFoundError:
                return []
        return sorted(name.removesuffix(".json") for name in found if not name.startswith("."))

    def drop(self, name: str) -> None:
        """Delete the value with the given name."""
        with self._told(), suppress(FileNotFoundError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _told(self) -> AbstractContextManager[None]:
        return os_errors_as(
            RendezvousError,
            f"the rendezvous {self.address} cannot be reached",
            "the rendezvous must be a directory in which all hosts can write",
        )


def find_problem(folder: Path) -> str | None:
    """Return how renames in an empty directory fail to be atomic, or None if they are atomic.

    The test makes about forty renames, while a thread reads.
    """
    return _one_by_one(folder) or _while_read(folder)


def _one_by_one(folder: Path) -> str | None:
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    os.rename(new, old)
    if new.exists() or old.read_text() != "new":
        return "renaming a file onto another file does not replace that file"
    with suppress(FileNotFoundError):
        os.rename(new, folder / "other")
        return "a file that does not exist can be renamed"
    for name in ("full", "next"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    with suppress(OSError):
        os.rename(folder / "next", folder / "full")
        return "renaming a directory replaces another directory that has files"
    return None


def _while_read(folder: Path) -> str | None:
    """Return how a read fails while a file is repeatedly replaced, or None if no read fails."""
    path, seen = folder / "value", set[str]()
    whole = "x" * 4096
    path.write_text(whole)
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                text = path.read_text()
            except FileNotFoundError:
                text = ""
            if text != whole:
                seen.add("is briefly missing" if not text else "briefly has a part of its content")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(PROBES):
            other = folder / f"value-{number}"
            other.write_text(whole)
            os.replace(other, path)
    finally:
        over.set()
        reader.join()
    return f"a file that is replaced by renaming {min(seen)}" if seen else None
