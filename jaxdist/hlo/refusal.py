"""The compiler's error for a program that does not fit the device's memory."""

from __future__ import annotations

import re

# The wording differs between releases of libtpu, and the error's name may be absent.
_OUT_OF_MEMORY = re.compile(r"Out of memory|out of memory|OOM|RESOURCE_EXHAUSTED|HbmOom")
_SIZES = re.compile(r"\((\d+(?:\.\d+)?)([KMGT]?)\)[^(]*\((\d+(?:\.\d+)?)([KMGT]?)\)")
_SCALES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def is_too_large(message: str) -> bool:
    """Return whether the message of a compiler refuses a program for lack of memory.

    >>> is_too_large("INTERNAL: RET_CHECK failure")
    False
    """
    return _OUT_OF_MEMORY.search(message) is not None


def refused_bytes(message: str) -> tuple[float, float] | None:
    """Return the bytes that a refused program needs, and the bytes that the device has.

    The result is None if the message does not state both numbers.

    >>> refused_bytes("RESOURCE_EXHAUSTED: total memory required (2.50G) exceeds available (1G)")
    (2684354560.0, 1073741824.0)
    """
    sizes = _SIZES.search(message) if is_too_large(message) else None
    if sizes is None:
        return None
    return float(sizes[1]) * _SCALES[sizes[2]], float(sizes[3]) * _SCALES[sizes[4]]
