"""The standard input of a process that another has started and speaks to.

`sys.stdin` has a lock, which a thread holds while it waits for a line; Python aborts a process that
ends meanwhile. What is read here has none.
"""

from __future__ import annotations

import io
from collections.abc import Iterator


def lines() -> Iterator[bytes]:
    """Lines as they come, to the end; for short ones, because they are read byte by byte."""
    yield from io.FileIO(0, closefd=False)


def wait_for_end() -> None:
    """Until whoever holds the other end has closed it, or has died."""
    with io.FileIO(0, closefd=False) as file:
        while file.read(4096):
            pass
