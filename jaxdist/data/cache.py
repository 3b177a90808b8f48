"""A cache of derived data between runs: each entry is a folder, which is published atomically."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxdist.errors import DataError


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the cache, which need not exist yet.

    The directory is the value of JAXDIST_CACHE, or else jaxdist in XDG_CACHE_HOME, or else
    ~/.cache/jaxdist.

    Args:
      environ: the environment variables.

    >>> cache_directory({"XDG_CACHE_HOME": "/home/ada/.cache"}).as_posix()
    '/home/ada/.cache/jaxdist'
    """
    if chosen := environ.get("JAXDIST_CACHE"):
        return Path(chosen)
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxdist"


def publish_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, and then rename the folder to `target`.

    If several processes publish the same target, the folder of the first process remains, and the
    other processes delete their folders, which are equal to it.

    Raises:
      OSError: the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=target.parent))
    try:
        write(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_published(content: bytes, sha256: str, name: str) -> bytes:
    """Return the content of a file, if it is the published content.

    Args:
      sha256: the digest of the published content, in hexadecimal digits.
      name: the name or the location of the file, for error messages.

    Raises:
      DataError: the content has another digest.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(
            f"data: {name} is not the published file: sha256 of its content is {digest}, expected "
            f"{sha256}; fetch the file again"
        )
    return content
