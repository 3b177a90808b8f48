"""The cycles that megablox's kernels take for a tile, by the schedule that libtpu prints.

`python -m benchmarks.tpu.grouped` compiles jax's products of rows with the kernels of their
experts, and their gradients, for one chip of v5p, as `benchmarks.tpu.splash` compiles attention. A
turn of a kernel's loop multiplies one tile of rows by one tile of an expert's kernel:

- A turn runs one of the largest regions: `gmm` has one such region for the last tile along the
  contracted features, and one for all other tiles. The region takes as many cycles as it has
  bundles, or as the matrix units need, whichever is more.
- Regions that begin the loop or follow a branch start and await copies, in every turn.
- The other regions clear the accumulator, once for each tile of the result. For `tgmm`, whose
  products contract the rows, this is rare and left out.

The resulting fraction of the peak is copied to `jaxdist/cost/kernels.toml`.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.core import child
from benchmarks.tpu.products import TOPOLOGIES
from benchmarks.tpu.splash import per_cycle, regions
from jaxdist.cost.kernels import GROUPED
from jaxdist.parallel.compiler import preset_options
from jaxdist.runtime.topology import topology_devices

FAMILY = "v5p"
TILES = tuple(GROUPED["gmm"])
ROWS, DEPTH, WIDTH, EXPERTS = 32768, 4096, 14336, 8
"""The sizes of a layer of Mixtral-8x7B, with the tokens of 4 sequences of 4,096."""

_KERNEL = re.compile(r"jit_(t?gmm)_\w*\.\d+-\d+-final_bundles\.txt$")


@dataclass(frozen=True)
class Turn:
    """The cycles of one tile: the least cycles of its products, and the cycles of the schedule."""

    kernel: str
    tile: tuple[int, int, int]
    product_cycles: int
    cycles: float

    @property
    def efficiency(self) -> float:
        """The share of the matrix units' peak."""
        return self.product_cycles / self.cycles


def turn(kernel: str, tile: tuple[int, int, int], listing: str) -> Turn:
    """Return the cycles of a turn, from the listing of a kernel's final bundles."""
    rows, depth, width = tile
    product_cycles = rows * depth * width // per_cycle(FAMILY)
    parts = sorted(regions(listing.splitlines()), key=lambda part: -part[1])
    bodies = 2 if kernel == "gmm" else 1
    each = sum(count for label, count in parts[bodies:] if label)
    once = sum(count for label, count in parts[bodies:] if not label) if kernel == "gmm" else 0
    cycles = max(parts[0][1], product_cycles) + each + once / (DEPTH // depth)
    return Turn(kernel, tile, product_cycles, cycles)


def compile_kernels(rows: int, depth: int, width: int) -> list[Turn]:
    """Compile the product and its gradients with a tile for one chip.

    The list is empty: the result is in the files that libtpu writes.
    """
    chip = topology_devices(TOPOLOGIES[FAMILY])[:1]

    def loss(x_RD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array) -> jax.Array:
        y_RF = gmm(x_RD, w_EDF, counts_E, x_RD.dtype, (rows, depth, width))
        return y_RF.astype(jnp.float32).sum()

    whole = NamedSharding(Mesh(np.array(chip), ("data",)), PartitionSpec())
    given = (
        jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((EXPERTS, DEPTH, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((EXPERTS,), jnp.int32),
    )
    lowered = jax.jit(jax.grad(loss, (0, 1)), in_shardings=whole, out_shardings=whole).lower(*given)
    options: Any = preset_options("default", chip[0])  # jax's type stub allows only None
    lowered.compile(compiler_options=options)
    return []


def measure(tile: tuple[int, int, int]) -> list[Turn]:
    """Compile in a new process, since libtpu reads its flags at the start; read the schedules.

    Raises:
      RunError: the process fails or takes too long.
    """
    with TemporaryDirectory() as directory:
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        environ = child.compiling_on(None) | {"LIBTPU_INIT_ARGS": flags}
        child.call(compile_kernels, *tile, what="compiling products of experts", environ=environ)
        return [
            turn(found[1], tile, (Path(directory) / name).read_text(errors="replace"))
            for name in sorted(os.listdir(directory))
            if (found := _KERNEL.search(name))
        ]


def main() -> None:
    """Print a line for each kernel and tile."""
    for tile in TILES:
        for one in measure(tile):
            print(
                f"{FAMILY} {one.kernel:<4} {' x '.join(map(str, tile))}: products "
                f"{one.product_cycles} cycles, turn {one.cycles:.0f}: {one.efficiency:.2f}"
            )


if __name__ == "__main__":
    # Imported by name, since the child process could not find a function of `__main__`.
    importlib.import_module("benchmarks.tpu.grouped").main()
