"""The lock on a run directory, which keeps a second run from writing to the directory.

The lock is a file that names its holder. The holder also takes an `flock` on the file. The kernel
releases the `flock` when the process ends for any reason; on a single host, the `flock` therefore
shows whether the holder is alive. Some network disks limit an `flock` to a single host or do not
support `flock`. The holder therefore also touches the file every few seconds, and a process that
finds the lock of another host watches the file for a while. The clocks of two hosts are never
compared. The process number in the lock is only printed, and not used to find the holder, since the
kernel may have given the number to another process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

from jaxdist.errors import RunError, os_errors_as
from jaxdist.heartbeat.run_folder import run_folder_of

FILE_NAME = "run.lock"
BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 45.0
"""The time, in seconds, for which a process watches whether the holder touches the file: several
intervals, since a disk may delay each touch.
"""
YOUNG_SECONDS = 2.0
"""The time, in seconds, for which a lock may name no holder because its creator has not yet written
the name.
"""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class HeldError(RunError):
    """The error that is raised if a live run holds the directory.

    Attributes:
      who: the description of the directory and its holder, without advice to the user.
    """

    def __init__(self, who: str, remedy: str) -> None:
        super().__init__(f"{who}: {remedy}")
        self.who = who


def writing_to(directory: Path) -> AbstractContextManager[None]:
    """Return a context that raises each OSError as an error about the run directory."""
    failed = f"run directory {directory} cannot be written"
    return os_errors_as(RunError, failed, "choose another directory with run.directory=PATH")


def this_process() -> dict[str, Any]:
    """Return the fields of a lock's file that describe this process, by name."""
    run_folder = run_folder_of(os.environ)
    fenced = {}
    if run_folder is not None and run_folder.fence is not None:
        fenced = {"fence": run_folder.fence, "generation": run_folder.generation}
    return {
        **fenced,
        "host": platform.node(),
        "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


class RunLock:
    """A lock that holds a run directory until `release`, or until its context ends.

    Args:
      directory: the run directory, which is created if it is missing.
      say: the function that is called with a line before a wait of up to `PATIENCE_SECONDS`.

    Raises:
      HeldError: a live run holds the directory; the message names the host and the process.
      RunError: the directory or the lock cannot be written.
    """

    def __init__(self, directory: Path, *, say: Callable[[str], None]) -> None:
        self.directory = directory
        self.path = directory / FILE_NAME
        self._say = say
        self._made: list[Path] = []
        with writing_to(directory):
            try:
                self._made = [path for path in (directory, *directory.parents) if not path.exists()]
                self._descriptor = self._acquire()
            except OSError:
                self._remove_empty()
                raise
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._show_life, name="run-lock", daemon=True)
        self._beat.start()

    def release(self) -> None:
        """Release the directory: remove the lock, and the created directories if they are empty."""
        self._released.set()
        self._beat.join()
        with suppress(OSError):
            # A later generation may have replaced the file, and the lock of that generation must
            # not be removed.
            if _is_at(self._descriptor, self.path):
                self.path.unlink()
        os.close(self._descriptor)
        self._remove_empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _acquire(self) -> int:
        young_until = time.monotonic() + YOUNG_SECONDS
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            # The directory may be missing again, because a run that was refused removes the
            # directory that it created.
            with suppress(FileNotFoundError):
                descriptor = self._attempt(young_until)
                if descriptor is not None:
                    return descriptor
            time.sleep(YOUNG_SECONDS / 100)

    def _attempt(self, young_until: float) -> int | None:
        """Return the lock's descriptor if this process now holds the lock, or None to try again.

        Args:
          young_until: the time of `time.monotonic` until which a lock without a holder may be the
            lock of a process that has not yet written its name.

        Raises:
          HeldError: a live run holds the directory.
        """
        descriptor, new = _open(self.path)
        try:
            locked = _flock(descriptor)
            # Another process that finds the new file may hold its flock for a moment, before it
            # leaves the file to the creator. The creator therefore tries again for a while.
            while new and locked is False and time.monotonic() < young_until:
                locked = _flock(descriptor)
            holder = {} if new else _read(descriptor)
            unsettled = not new and (not holder or not _is_at(descriptor, self.path))
            if unsettled and time.monotonic() < young_until:
                os.close(descriptor)
                return None
            if _is_deposed(holder):
                # A later generation has replaced the holder's generation, but the holder's process
                # may still be alive and hold the flock. Therefore only a new file can be locked.
                self.path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
            if locked is False or not (new or self._is_free(holder, locked=bool(locked))):
                raise self._held(holder)
            _write(descriptor, this_process())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _is_free(self, holder: dict[str, Any], *, locked: bool) -> bool:
        """Return whether the process that an existing lock names has ended.

        If this cannot be known at once, the method waits up to `PATIENCE_SECONDS`. The process has
        not ended if it touches the lock during the wait.

        Args:
          locked: whether this process has acquired the flock.
        """
        own = this_process()
        # If the holder is on this host, and began after the last boot, an flock can be acquired
        # only if the holder's process has ended.
        if locked and all(holder.get(key) == own[key] for key in ("host", "boot")):
            return True
        self._say(
            f"{self.directory} is locked by {_named(holder)}: waiting up to {PATIENCE_SECONDS:g} "
            "s to see whether that process is alive"
        )
        first = _stamp(self.path)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            if _stamp(self.path) != first:
                return False
        return True

    def _held(self, holder: dict[str, Any]) -> HeldError:
        return HeldError(
            f"run directory {self.directory} is in use by {_named(holder)}",
            "wait for that run to end or stop it, or choose another directory with "
            f"run.directory=PATH (if you are certain that the run has ended, remove {self.path})",
        )

    def _show_life(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):  # The disk may be unreachable for a moment.
                os.utime(self._descriptor)

    def _remove_empty(self) -> None:
        for path in self._made:
            try:
                path.rmdir()
            except OSError:
                return


def _open(path: Path) -> tuple[int, bool]:
    """Open or create the lock; return its descriptor, and whether this call created the file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, os.O_RDWR), False


def _is_deposed(holder: dict[str, Any]) -> bool:
    """Return whether the holder belongs to an earlier generation of this process's run."""
    own = this_process()
    return (
        "fence" in own
        and holder.get("fence") == own["fence"]
        and holder.get("generation", own["generation"]) < own["generation"]
    )


def _flock(descriptor: int) -> bool | None:
    """Return whether the flock was acquired, or None if the disk does not support flocks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> object:
    """Return a value that changes if the holder touches the file, or None without a file."""
    try:
        # The file is opened, since a network disk may answer `stat` on a path from a cache instead
        # of asking the server.
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(descriptor: int) -> dict[str, Any]:
    """Return the description of the holder in the lock, or {} if the holder has not written it."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(descriptor: int, holder: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
    os.fsync(descriptor)


def _named(holder: dict[str, Any]) -> str:
    """Describe a holder to the user, with `?` for each value that the lock does not contain."""
    process, host, since = (holder.get(key, "?") for key in ("process", "host", "since"))
    return f"process {process} on {host} since {since}"
