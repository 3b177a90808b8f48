"""The parser of `tf.train.Example` messages, which fill TensorFlow Datasets' ArrayRecord files.

An example is a map from names to lists of bytes, float32 or int64, stored as a protocol buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxdist.errors import DataError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse_example(record: bytes, name: str) -> Mapping[str, Any]:
    """Return, for each name in a `tf.train.Example`, a list of bytes or a float32 or int64 array.

    Args:
      name: the name of the record in error messages.

    Raises:
      DataError: the record is not such a message.

    >>> parse_example(bytes.fromhex("0a0d0a0b0a016112061a040a02ac02"), "record 0")
    {'a': array([300])}
    """
    try:
        return {
            key.decode(): _values(feature)
            for features in _parts(record, 1)
            for entry in _parts(features, 1)
            for key, feature in zip(_parts(entry, 1), _parts(entry, 2), strict=True)
        }
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise DataError(
            f"data: {name} is not a tf.train.Example: write it again, or read your own format "
            "with data.type: import"
        ) from error


def _values(feature: bytes) -> Any:
    """Return the only list of a feature; a feature with no list or several lists is an error."""
    (kind, content), *more = _fields(feature)
    if more or kind not in (1, 2, 3) or not isinstance(content, bytes):
        raise ValueError("a feature has no list, or several lists")
    parts = [value for number, value in _fields(content) if number == 1]
    if kind == 1:
        return [part for part in parts if isinstance(part, bytes)]
    joined = b"".join(part for part in parts if isinstance(part, bytes))
    if kind == 2:
        return np.frombuffer(joined, "<f4")
    single = [part for part in parts if isinstance(part, int)]
    return np.array(single, np.uint64).view(np.int64) if single else _varints(joined)


def _parts(message: bytes, wanted: int) -> list[bytes]:
    """Return the values of all fields with the number `wanted`; each value must be bytes."""
    found = [value for number, value in _fields(message) if number == wanted]
    if not all(isinstance(value, bytes) for value in found):
        raise ValueError(f"field {wanted} has no bytes")
    return found  # pyright: ignore[reportReturnType]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field; numbers of fixed size are yielded as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"no wire type {kind}")
        if at + size > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and the position after the number."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (2**64 - 1), at


def _varints(content: bytes) -> np.ndarray:
    """Return packed numbers as int64; each byte has seven bits of a number, lowest first."""
    raw = np.frombuffer(content, np.uint8)
    if not len(raw):
        return np.empty(0, np.int64)
    last = np.flatnonzero(raw < 128)
    if not len(last) or last[-1] != len(raw) - 1:
        raise ValueError("a number is cut off")
    first = np.concatenate([[0], last[:-1] + 1])
    places = np.arange(len(raw)) - np.repeat(first, last - first + 1)
    bits = (raw & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, first).view(np.int64)
