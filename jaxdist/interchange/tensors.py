"""A tensor in a file: shape and dtype known from a header, elements read where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
      offset: position of its first byte in the file.
      decode: function from the file's bytes to an array, for blocks of a quantized tensor; None
        is a tensor whose elements have `dtype`.
      stored_bytes: length in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    stored_bytes: int
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def open(self) -> np.ndarray:
        """Map the tensor into memory, of which reading takes what it touches; a view, read-only.

        The mapping ends with the last reference to it. A quantized tensor is decoded whole.
        """
        if self.decode is not None:
            raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.stored_bytes,))
            return self.decode(raw).reshape(self.shape)
        if not self.stored_bytes:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
