"""Standard output and error that may go away: a reader that has seen enough, a disk that is full.

A run of days does not end because the pipe that shows it did. What can no longer be written is
dropped, and said once on standard error where that is still there.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, writing to standard output or error never raises.

    A reader that went away (`| head -1`, a closed terminal) wanted no more. Where output was lost
    for any other reason, a command that ends well exits with code 1 all the same.
    """
    streams = _Lasting(1), _Lasting(2)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        _text(stream, old) for stream, old in zip(streams, before, strict=True)
    )
    try:
        yield
    except SystemExit as ended:
        _flush()
        if not ended.code and streams[0].lost:
            raise SystemExit(1) from None
        raise
    finally:
        _flush()
        sys.stdout, sys.stderr = before


class _Lasting(io.FileIO):
    """A descriptor that leads nowhere from the first write that fails."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(_opened(descriptor), "w", closefd=False)
        self.lost = False
        self._terminal = self.isatty()

    def write(self, data: Any, /) -> int | None:
        """Bytes taken, as `io.RawIOBase.write` has it."""
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            closed = self._terminal and error.errno == errno.EIO
            self.lost = not (closed or isinstance(error, BrokenPipeError))
            if self.fileno() == 1:
                words = f"standard output: {error.strerror}; the command goes on without it"
                print(words, file=sys.stderr)
            return len(data)


def _opened(descriptor: int) -> int:
    """The descriptor; where the caller had closed it, nowhere, so that no file takes its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    return descriptor


def _text(raw: _Lasting, old: TextIO | None) -> TextIO:
    if old is not None:
        old.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", "utf-8"),
        errors=getattr(old, "errors", "backslashreplace"),
        line_buffering=getattr(old, "line_buffering", True),
        write_through=getattr(old, "write_through", False),
    )


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
