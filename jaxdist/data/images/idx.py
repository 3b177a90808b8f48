"""The IDX format of the MNIST family: a header of sizes, then raw bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from jaxdist.config.files import read_regular
from jaxdist.errors import DataError, os_errors_as

_UINT8 = 0x08
_MAX_DIMS = 4


def parse_idx(content: bytes, name: str) -> np.ndarray:
    """Parse the uint8 array in an IDX file's content, as a read-only view of the content.

    An IDX file has two zero bytes, the code of the dtype, the number of dims, each dim as a
    big-endian uint32, and the values.

    Args:
      content: the file, uncompressed.
      name: the name of the file in error messages.

    Raises:
      DataError: the content is not an IDX file of uint8 with 1 to 4 dims, or its length differs
        from the length that its header states.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels").tolist()
    [7, 9]
    """
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(
            f"data: {name} is not an IDX file: it begins with {content[:4].hex(' ') or 'nothing'}, "
            "expected 00 00 08 and the number of dims"
        )
    code, dims = content[2], content[3]
    if code != _UINT8:
        raise DataError(
            f"data: {name} has IDX dtype 0x{code:02x}, expected 0x08 (uint8): convert the file"
        )
    if not 1 <= dims <= _MAX_DIMS:
        raise DataError(
            f"data: {name} has {dims} IDX dims, expected 1 to {_MAX_DIMS}: fetch the file again"
        )
    start = 4 + 4 * dims
    if len(content) < start:
        raise DataError(
            f"data: {name} is truncated: it has {len(content)} bytes, but its header alone has "
            f"{start}; fetch the file again"
        )
    shape = struct.unpack_from(f">{dims}I", content, 4)
    size = math.prod(shape)
    if len(content) - start != size:
        problem = "is truncated" if len(content) - start < size else "is too long"
        raise DataError(
            f"data: {name} {problem}: it holds {len(content) - start} values, but its header "
            f"says {' x '.join(map(str, shape))} = {size}; fetch the file again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_content(path: Path) -> bytes:
    """Read a file's content, unpacked if its name ends in .gz.

    Raises:
      DataError: the file cannot be read or unpacked.
    """
    with os_errors_as(DataError, f"data: {path} cannot be read"):
        content = read_regular(path)
    return unpack_gzip(content, str(path)) if path.suffix == ".gz" else content


def unpack_gzip(packed: bytes, name: str) -> bytes:
    """Unpack a gzip file, whose name in messages is `name`.

    Raises:
      DataError: the file is damaged.
    """
    failed = f"data: {name} cannot be unpacked ({len(packed)} bytes)"
    with os_errors_as(DataError, failed, "fetch it again", also=(EOFError, zlib.error)):
        return gzip.decompress(packed)
