"""Read small files that anybody may have put there: a pipe or a device ends in an error.

`Path.read_text` on a named pipe waits forever, on `/dev/zero` it fills the memory, and
`json.loads` on ten thousand brackets raises RecursionError, which no caller expects.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

from jaxdist.types import Json

MOST_BYTES = 1 << 28
"""The largest file that is read: a manifest of a million files has about this size."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
      OSError: it cannot be read, is no regular file, or has more than `most_bytes`.
    """
    # O_NONBLOCK: opening a named pipe without a writer would wait for one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    Raises:
      OSError: see `read_bytes`.
      UnicodeDecodeError: it is not UTF-8; a ValueError.
    """
    return read_bytes(path, most_bytes).decode("utf-8")


def parse_json(text: str | bytes) -> Json:
    """Return the value of a JSON text.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply

    Raises:
      ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Json:
    """Return the value of a JSON file.

    Raises:
      OSError: see `read_bytes`.
      ValueError: see `parse_json`; or it is not UTF-8.
    """
    return parse_json(read_bytes(path, most_bytes))
