"""Standard output and standard error that continue after a closed pipe or a full disk.

A long run does not end because the pipe for its output is closed. Output that can no longer be
written is dropped. If possible, a single message on standard error reports this.
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
    """Prevent errors of writes to standard output or standard error inside the block.

    If the reader has ended (`| head -1`, or a closed terminal), the exit code does not change. If
    standard output is lost for any other reason, a command that would otherwise succeed exits with
    code 1.
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


def silence() -> None:
    """Discard the standard output of this process, and of processes that it starts later."""
    _discard(1)


def _discard(descriptor: int) -> None:
    """Replace a file descriptor, which may be closed, by /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Lasting(io.FileIO):
    """A file descriptor whose output is discarded after the first failed write."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(_opened(descriptor), "w", closefd=False)
        self.lost = False
        self._terminal = self.isatty()

    def write(self, data: Any, /) -> int | None:
        """Write bytes, and return the number of bytes; see `io.RawIOBase.write`.

        Bytes that are lost count as written.

        The result is never None.
        """
        try:
            return super().write(data)
        except OSError as error:
            _discard(self.fileno())
            # A closed terminal raises EIO, and a closed pipe raises BrokenPipeError.
            closed = self._terminal and error.errno == errno.EIO
            self.lost = not (closed or isinstance(error, BrokenPipeError))
            if self.fileno() == 1:
                words = (
                    f"cannot write to standard output: {error.strerror}; the command continues "
                    "without standard output"
                )
                print(words, file=sys.stderr)
            return len(data)


def _opened(descriptor: int) -> int:
    """Return the file descriptor, which is open afterwards.

    If the descriptor is closed, it is opened on /dev/null, so that no file that is opened later
    receives its number.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        _discard(descriptor)
    return descriptor


def _text(raw: _Lasting, old: TextIO | None) -> TextIO:
    if old is not None:
        # The buffer of the old stream is flushed first, because its text must precede the new
        # stream's text.
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
