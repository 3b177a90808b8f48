"""The reader and the writer of safetensors files.

A file has eight bytes with the length of the header, a JSON header, and the bytes of the tensors.
Source: the documentation of the format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxdist.config.files import parse_json
from jaxdist.errors import DataError, os_errors_as
from jaxdist.interchange.tensors import Tensor

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
MOST_HEADER_BYTES = 100_000_000
"""The size of the largest header that the format allows, in bytes."""
_ALIGN = 8


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; only the header is read, and no element.

    Raises:
      DataError: the file cannot be read, or is truncated, or its header is malformed.
    """
    with os_errors_as(DataError, f"{file} cannot be read", "give a file that you may read"):
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > MOST_HEADER_BYTES or 8 + length > size:
                raise DataError(
                    f"{file} is not a complete safetensors file: it has {size:,} bytes, and its "
                    f"header alone would have {length:,}; download the file again"
                )
            raw = opened.read(length)
    again = "download the file again"
    with os_errors_as(DataError, f"{file}: its header is not JSON", again, also=(ValueError,)):
        header: Any = parse_json(raw)
    if not isinstance(header, dict):
        raise DataError(f"{file}: its header is not a mapping of tensors; download the file again")
    header.pop("__metadata__", None)
    found = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((t.offset + t.stored_bytes for t in found.values()), default=8 + length)
    if end != size:
        word = "truncated: it has" if end > size else "longer than its header says: it has"
        raise DataError(f"{file} is {word} {size:,} bytes of {end:,}; download the file again")
    return found


def _tensor(file: Path, name: str, entry: Any, start: int) -> Tensor:
    failed = f"{file}: the header's entry of {name!r} is malformed"
    again = "download the file again"
    with os_errors_as(DataError, failed, again, also=(KeyError, TypeError, ValueError)):
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = [*shape, begin, end]
        if not all(type(n) is int and n >= 0 for n in numbers) or end < begin:
            raise ValueError("its sizes are not whole numbers from 0")
    if dtype is None:
        known = ", ".join(DTYPES)
        raise DataError(
            f"{file}: {name!r} has the unknown dtype {entry['dtype']} (known: {known}); convert "
            "the model to BF16 or F32"
        )
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise DataError(
            f"{file}: {name!r} is {entry['dtype']}{list(shape)} but has {end - begin:,} bytes, "
            "which do not match; download the file again"
        )
    return Tensor(name, shape, dtype, file, start + begin, end - begin)


def write(
    file: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    value: Callable[[str], np.ndarray],
) -> None:
    """Write a file tensor by tensor, so that only one array is in memory at a time.

    Args:
      tensors: the name, shape and dtype of each tensor.
      value: a function from a tensor's name to its array; the function is called in the order of
        `tensors`.

    Raises:
      OSError: the file cannot be written.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entry = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = entry
    raw = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the header, which align the tensors.
    raw += b" " * (-len(raw) % _ALIGN)
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape, dtype in tensors:
            array = np.asarray(value(name), dtype, order="C")
            assert array.shape == shape, (name, array.shape, shape)
            # The array is viewed as bytes, because a file cannot write NumPy's buffer of bfloat16.
            opened.write(array.reshape(-1).view(np.uint8).data)
