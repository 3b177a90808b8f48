"""Safe reads of files from unknown sources, which refuse anything except regular files.

Opening a pipe may block for ever, and a device file may be endless. `json.loads` raises
RecursionError for ten thousand brackets, which no caller expects.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from jaxdist.types import Json

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of the object at a path, such as a pipe, or None for a regular file.

    Raises:
      OSError: the path does not exist or cannot be examined.
    """
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "the file name contains a null character", os.fspath(path))
    mode = os.stat(path).st_mode
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def why_unread(error: Exception) -> str:
    """Return the reason why a file could not be read, without the error number and the path.

    >>> why_unread(OSError(2, "No such file or directory", "x.csv"))
    'No such file or directory'
    """
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
      OSError: the file is missing, unreadable, or not a regular file; `strerror` has the reason.
    """
    kind = path_kind(path)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
    return Path(path).read_bytes()


def replace_text(path: Path, text: str) -> None:
    """Write or replace a text file atomically; see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file atomically, so that a kill leaves no file with a part of it.

    Several processes may write the same file at the same time.

    Raises:
      OSError: the file cannot be written.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staging.write_bytes(content)
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):
            staging.unlink()
        raise


def parse_json(text: str | bytes) -> Json:
    """Return the value of a JSON text.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply

    Raises:
      ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> Json:
    """Return the value of a regular file with JSON.

    Raises:
      OSError: see `read_regular`.
      ValueError: see `parse_json`.
    """
    return parse_json(read_regular(path))
