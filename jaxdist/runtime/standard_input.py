"""The standard input of a process that another process started and sends lines to.

`sys.stdin` has a lock, which a thread holds while it waits for a line; Python aborts a process that
ends meanwhile. The functions here read without a lock.
"""

from __future__ import annotations

import io
from collections.abc import Iterator


def lines() -> Iterator[bytes]:
    """Yield lines as they arrive; only for short lines, because they are read byte by byte."""
    yield from io.FileIO(0, closefd=False)


def wait_for_end() -> None:
    """Wait until the holder of the other end has closed it, or has died."""
    with io.FileIO(0, closefd=False) as file:
        while file.read(4096):
            pass
