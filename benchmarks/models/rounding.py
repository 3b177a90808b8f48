"""The rounding of single products in float32 by XLA on a CPU, and by torch.

`python -m benchmarks.models.rounding PYTHON`; PYTHON must have torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROWS, COLUMNS, ADDENDS = 512, 576, (64, 576, 1536)
"""Sizes of SmolLM2-135M: tokens, width, and the numbers of addends of a product's element."""
PEER = """
import sys, numpy, torch
a, b = (torch.from_numpy(numpy.load(path)) for path in sys.argv[1:3])
numpy.save(sys.argv[3], (a @ b).numpy())
"""


def rounded(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Return the relative error of a product, compared with float64.

    The error is the root mean square of the difference, divided by the root mean square of the
    elements.
    """
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def main(python: str) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{key}.npy" for key in "abc"]
        for count in ADDENDS:
            a = rng.standard_normal((ROWS, count), np.float32)
            b = rng.standard_normal((count, COLUMNS), np.float32)
            for file, array in zip(files, (a, b), strict=False):
                np.save(file, array)
            subprocess.run([python, "-c", PEER, *map(str, files)], check=True)
            own = rounded(np.asarray(jax.jit(jnp.matmul)(a, b)), a, b)
            print(f"{count} addends: XLA {own:.1e}, torch {rounded(np.load(files[2]), a, b):.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
