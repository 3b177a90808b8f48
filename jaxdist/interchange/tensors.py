"""A tensor in a file, of which only the header has been read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.errors import DataError


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
      offset: the position of the tensor's first byte in the file.
      decode: a function from the stored bytes of a quantized tensor to an array, or None if the
        file has elements of `dtype`.
      stored_bytes: the number of bytes of the tensor in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    stored_bytes: int
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def open(self) -> np.ndarray:
        """Return the tensor as a read-only memory map; only elements that are used are read.

        The map is closed with the last reference to the array. A quantized tensor is read and
        decoded completely instead.
        """
        if not self.stored_bytes:  # A map of 0 bytes is not possible.
            return np.zeros(self.shape, self.dtype)
        begin = self.offset % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as file:
            given = {"access": mmap.ACCESS_READ, "offset": self.offset - begin}
            held = mmap.mmap(file.fileno(), begin + self.stored_bytes, **given)
        if self.decode is not None:
            raw = np.frombuffer(held, np.uint8, self.stored_bytes, begin)
            return self.decode(raw).reshape(self.shape)
        return np.ndarray(self.shape, self.dtype, held, begin)

    def read_into(self, out: np.ndarray) -> None:
        """Read the whole tensor into a contiguous array that has the dtype of the tensor.

        A map would cost page faults, which take as long as the reading.

        Raises:
          DataError: the file ends before the tensor.
        """
        left = out.reshape(-1).view(np.uint8).data
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            # A call may read less than it is asked for, as Linux does beyond 2 GiB.
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise DataError(f"{self.file} ends within {self.name!r}; download the file again")
