"""Files that a user names: only a regular one is read, since to open a pipe may wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a path names that is no regular file, in words; None for a regular file.

    Raises:
      OSError: there is nothing, or it cannot be looked at.
    """
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "a file name holds no null character", os.fspath(path))
    mode = os.stat(path).st_mode
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file.

    Raises:
      OSError: it is missing, of another kind, or cannot be read; `strerror` says which.
    """
    kind = kind_of(path)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
    return Path(path).read_bytes()
