"""Descriptions, in one line each, of errors of orbax, tensorstore and the operating system."""

from __future__ import annotations

import errno

_MAX_CHARACTERS = 400
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded")


def one_line(error: Exception) -> str:
    """Return the type of an error and the beginning of its text, in one line.

    >>> one_line(OSError(5, "Input/output error"))
    'OSError: [Errno 5] Input/output error'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_CHARACTERS]}"


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, means that the disk is full.

    The texts of the errors are searched as well, since tensorstore's errors are not OSErrors.

    >>> is_disk_full(ValueError("RESOURCE_EXHAUSTED: write: No space left on device"))
    True
    """
    while error is not None:
        if getattr(error, "errno", None) in _FULL_ERRNOS:
            return True
        if any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def how_lost(error: OSError) -> str:
    """Describe what happened to a directory that existed before, from the error of an access to it.

    >>> how_lost(FileNotFoundError())
    'is gone'
    """
    if isinstance(error, FileNotFoundError):
        return "is gone"
    if isinstance(error, NotADirectoryError):
        return "is no longer a directory"
    return f"can no longer be used ({one_line(error)})"
